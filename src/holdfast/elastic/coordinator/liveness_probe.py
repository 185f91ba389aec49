"""Liveness probe of a silent agent: its machine answers at once if the agent has ended.

An agent's own silence means something only after three heartbeats. But its machine answers every
connection to the agent's port. If it refuses the connection, the agent has ended, and its workers
with it. No agent is probed while all goes well. A lost node first shows in the workers of the other
nodes, and only then the silent agents are probed.

An agent that was stopped accepts connections and sends nothing. While the other nodes wait for it,
it is lost after `AWAITED_SILENCE_S` without a heartbeat. It joins again when it continues.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Protocol

from holdfast.elastic.protocol.coordinator_messages import NodeReport
from holdfast.policy.membership.transitions import CoordinatorState, Phase, awaited_members

LIVENESS_PROBE_TIMEOUT_S = 2.0
UNREACHABLE_ERRNOS = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
MAX_LIVENESS_PROBES = 64
"""Most agents that are probed at a time: if more are silent, they are only slow."""

UNSETTLED_PHASES = (Phase.STARTING, Phase.HALTING)
AWAITED_SILENCE_S = 2.0
"""Seconds without an open heartbeat after which an agent that the other nodes wait for is lost. An
agent sends the next heartbeat within milliseconds."""
AGENT_PROBE_INTERVAL_S = 0.2
"""Seconds between two probes for ended agents; a live machine answers a probe at once."""


class ProbedTerm(Protocol):
    """The coordinator as the probe sees it."""

    state: CoordinatorState
    node_reports: dict[str, NodeReport]

    def declare_lost(self, name: str, cause: str) -> None:
        """Count a node as lost."""
        ...


class EndedAgentsProbe:
    """Probes silent nodes while a generation stops or begins: their agents may have ended."""

    def __init__(self, term: ProbedTerm, silent_s: Callable[[str, float], float]) -> None:
        """silent_s: returns for how long a node has no heartbeat open at a time, in seconds."""
        self._term, self._silent_s = term, silent_s
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to probe if a generation stops or begins."""
        idle = self._task is None or self._task.done()
        if self._term.state.phase in UNSETTLED_PHASES and idle:
            self._task = asyncio.create_task(self._remove_ended_agents())

    async def _remove_ended_agents(self) -> None:
        term, clock = self._term, asyncio.get_running_loop().time
        on_time_since = clock()  # since when this process was never late itself
        while term.state.phase in UNSETTLED_PHASES:
            begun = clock()
            await asyncio.sleep(AGENT_PROBE_INTERVAL_S)
            if (now := clock()) - begun > 2 * AGENT_PROBE_INTERVAL_S:
                on_time_since = now
            for name in awaited_members(term.state):
                seconds = min(self._silent_s(name, now), now - on_time_since)
                if seconds > AWAITED_SILENCE_S:
                    term.declare_lost(name, f"not heard for {seconds:.1f} s, while nodes wait")
            silent = {
                name: term.node_reports[name].facts.address
                for name in awaited_members(term.state)
                if name in term.node_reports
            }
            for name in await ended_agents(silent):
                if name in awaited_members(term.state):
                    term.declare_lost(name, "its agent has ended")


async def ended_agents(addresses: Mapping[str, str]) -> Iterable[str]:
    """Return the names of the agents that have certainly ended."""
    if not addresses or len(addresses) > MAX_LIVENESS_PROBES:
        return ()
    answers = await asyncio.gather(
        *(probe(a, LIVENESS_PROBE_TIMEOUT_S) for a in addresses.values())
    )
    return [
        name for name, found in zip(addresses, answers, strict=True) if found is ProbeResult.REFUSED
    ]


class ProbeResult(Enum):
    LISTENS = "listens"
    REFUSED = "refused"  # by its machine: no process listens there
    SILENT = "silent"  # packets do not arrive
    UNKNOWN = "unknown"  # no address, or an error of this machine's own


async def probe(address: str, timeout_s: float) -> ProbeResult:
    """Connect to `address`, "host:port", and return the result. Does not raise."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except ConnectionRefusedError:
        return ProbeResult.REFUSED
    except TimeoutError:
        return ProbeResult.SILENT
    except (OSError, ValueError, OverflowError) as error:
        return (
            ProbeResult.SILENT
            if getattr(error, "errno", None) in UNREACHABLE_ERRNOS
            else ProbeResult.UNKNOWN
        )
    writer.close()
    return ProbeResult.LISTENS
