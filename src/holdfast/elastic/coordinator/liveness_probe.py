"""Liveness probe of a silent agent: its machine answers at once if the agent has ended.

An agent's own silence means something only after three heartbeats. But its machine answers every
connection to the agent's port. If it refuses the connection, the agent has ended, and its workers
with it. No agent is probed while all goes well. A lost node first shows in the workers of the other
nodes, and only then the silent agents are probed.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterable, Mapping
from enum import Enum

LIVENESS_PROBE_TIMEOUT_S = 2.0
UNREACHABLE_ERRNOS = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
MAX_LIVENESS_PROBES = 64
"""Most agents that are probed at a time: if more are silent, they are only slow."""


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
