"""The reachability probe: finds nodes that this node does not reach, though the coordinator may
hear both.

A link between two switches can fail while every agent still reaches its coordinator. Then no node
is lost, but workers wait for each other in vain. So if a generation ends because all workers wait,
each agent probes the other agents' machines before it reports that its workers hold. From then on,
every heartbeat names the unreachable nodes. The agent probes them again in the background until it
reaches them. (Partial partitions: Alquraan et al., "An analysis of network-partitioning failures in
cloud systems", OSDI 2018, section 4.)

Any answer of the machine counts, even a refused connection: `liveness_probe` finds ended agents.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from itertools import islice

from holdfast.elastic.coordinator.liveness_probe import ProbeResult, probe

REACH_PROBE_TIMEOUT_S = 1.5
"""Timeout of one attempt; the kernel can resend one lost packet within it."""
PROBE_LATENESS_S = 0.5
"""An agent that wakes so many seconds late has missed the answers meanwhile, and tries again."""
MAX_PROBE_ATTEMPTS = 3
MAX_PROBED_AGENTS = 64
"""Other agents that each agent probes: those that follow it by name. With at most twice as many
agents, at least one of any two probes the other."""


class ReachabilityProbe:
    """The reachability probe of one agent. Lives in one event loop."""

    def __init__(self) -> None:
        self._unreachable: dict[str, str] = {}  # name -> address: newer generations may lack it
        self._probe_task: asyncio.Task[None] | None = None
        self._is_full_probe = False

    @property
    def unreachable(self) -> tuple[str, ...]:
        return tuple(self._unreachable)

    @property
    def is_probing(self) -> bool:
        """Return True while `probe_all` is under way."""
        return self._is_full_probe and self._probe_task is not None and not self._probe_task.done()

    def probe_all(
        self, own_name: str, agent_addresses: Mapping[str, str], on_done: Callable[[], None]
    ) -> None:
        """Probe the other agents in the background. agent_addresses: name -> "host:port", with
        `own_name`. on_done: called at the end."""
        names = sorted(agent_addresses)
        after = [name for name in names if name > own_name] + [
            name for name in names if name < own_name
        ]
        self._start_probe(
            {name: agent_addresses[name] for name in islice(after, MAX_PROBED_AGENTS)},
            is_full_probe=True,
        )
        assert self._probe_task is not None
        self._probe_task.add_done_callback(lambda _: on_done())

    def retry(self, agent_addresses: Mapping[str, str]) -> None:
        """Probe the unreachable agents again. agent_addresses: as in `probe_all`; an address may
        have changed."""
        if self._unreachable and (self._probe_task is None or self._probe_task.done()):
            self._start_probe(
                {n: agent_addresses.get(n, old) for n, old in self._unreachable.items()},
                is_full_probe=False,
            )

    def close(self) -> None:
        if self._probe_task is not None:
            self._probe_task.cancel()

    def _start_probe(self, agent_addresses: Mapping[str, str], *, is_full_probe: bool) -> None:
        self.close()
        self._is_full_probe = is_full_probe
        self._probe_task = asyncio.create_task(self._probe_agents(agent_addresses))

    async def _probe_agents(self, agent_addresses: Mapping[str, str]) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(MAX_PROBE_ATTEMPTS):
            begun = loop.time()
            found = await asyncio.gather(
                *(probe(a, REACH_PROBE_TIMEOUT_S) for a in agent_addresses.values())
            )
            if loop.time() - begun < REACH_PROBE_TIMEOUT_S + PROBE_LATENESS_S:
                named = zip(agent_addresses.items(), found, strict=True)
                self._unreachable = dict(
                    agent for agent, came in named if came is ProbeResult.SILENT
                )
                return
