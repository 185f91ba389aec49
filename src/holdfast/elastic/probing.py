"""Whether an agent that says nothing is dead, asked of its machine: it says so itself, at once.

An agent's own silence takes three heartbeats to mean anything. But where it listens, its machine
answers whoever connects; and when nobody listens there any more, the agent has ended, and its
workers with it. Nobody is asked while all goes well: a node that is lost shows in the workers of
the others, and then whoever has not answered is looked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

CONNECT_SECONDS = 2.0
MOST = 64
"""Agents that are looked for at a time: when so many are silent, they are only slow."""


async def dead(addresses: Mapping[str, str]) -> Iterable[str]:
    """Which of these agents, by name, have ended; nothing is known of the others."""
    if not addresses or len(addresses) > MOST:
        return ()
    refused = await asyncio.gather(*map(_refuses, addresses.values()))
    return [name for name, gone in zip(addresses, refused, strict=True) if gone]


async def _refuses(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError):  # unknown, or not to be reached
        return False
    writer.close()
    return False
