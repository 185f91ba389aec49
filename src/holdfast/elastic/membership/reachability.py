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

from holdfast.elastic.coordinator.liveness_probe import Answer, answer

SECONDS = 1.5
"""Timeout of one attempt; the kernel can resend one lost packet within it."""
LATE = 0.5
"""An agent that wakes so many seconds late has missed the answers meanwhile, and tries again."""
TRIES = 3
MOST = 64
"""Other agents that each agent probes: those that follow it by name. With at most twice as many
agents, at least one of any two probes the other."""


class Reaching:
    """The reachability probe of one agent. Lives in one event loop."""

    def __init__(self) -> None:
        self._missed: dict[str, str] = {}  # name -> address: newer generations may lack it
        self._trying: asyncio.Task[None] | None = None
        self._first = False

    @property
    def missed(self) -> tuple[str, ...]:
        return tuple(self._missed)

    @property
    def looking(self) -> bool:
        """Return True while `look` is under way."""
        return self._first and self._trying is not None and not self._trying.done()

    def look(self, own: str, agents: Mapping[str, str], ended: Callable[[], None]) -> None:
        """Probe the other agents in the background. agents: name -> "host:port", with `own`.
        ended: called at the end."""
        names = sorted(agents)
        after = [name for name in names if name > own] + [name for name in names if name < own]
        self._start({name: agents[name] for name in islice(after, MOST)}, first=True)
        assert self._trying is not None
        self._trying.add_done_callback(lambda _: ended())

    def again(self, agents: Mapping[str, str]) -> None:
        """Probe the unreachable agents again. agents: as in `look`; an address may have changed."""
        if self._missed and (self._trying is None or self._trying.done()):
            self._start({n: agents.get(n, old) for n, old in self._missed.items()}, first=False)

    def close(self) -> None:
        if self._trying is not None:
            self._trying.cancel()

    def _start(self, agents: Mapping[str, str], *, first: bool) -> None:
        self.close()
        self._first = first
        self._trying = asyncio.create_task(self._try(agents))

    async def _try(self, agents: Mapping[str, str]) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(TRIES):
            begun = loop.time()
            found = await asyncio.gather(*(answer(a, SECONDS) for a in agents.values()))
            if loop.time() - begun < SECONDS + LATE:
                named = zip(agents.items(), found, strict=True)
                self._missed = dict(agent for agent, came in named if came is Answer.SILENT)
                return
