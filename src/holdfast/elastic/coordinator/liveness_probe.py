"""Whether an agent that says nothing is dead, asked of its machine: it says so itself, at once.

An agent's own silence takes three heartbeats to mean anything. But where it listens, its machine
answers whoever connects; and when nobody listens there any more, the agent has ended, and its
workers with it. Nobody is asked while all goes well: a node that is lost shows in the workers of
the others, and then whoever has not answered is looked for.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterable, Mapping
from enum import Enum

CONNECT_SECONDS = 2.0
SILENCE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
MOST = 64
"""Agents that are looked for at a time: when so many are silent, they are only slow."""


async def dead(addresses: Mapping[str, str]) -> Iterable[str]:
    """Which of these agents, by name, have ended; nothing is known of the others."""
    if not addresses or len(addresses) > MOST:
        return ()
    answers = await asyncio.gather(*(answer(a, CONNECT_SECONDS) for a in addresses.values()))
    return [name for name, found in zip(addresses, answers, strict=True) if found is Answer.REFUSED]


class Answer(Enum):
    LISTENS = "listens"
    REFUSED = "refused"  # by its machine: nobody listens there
    SILENT = "silent"  # packets do not arrive
    UNKNOWN = "unknown"  # no address, or an error of this machine's own


async def answer(address: str, seconds: float) -> Answer:
    """What comes of connecting to `address`, "host:port". Does not raise."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(seconds):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except ConnectionRefusedError:
        return Answer.REFUSED
    except TimeoutError:
        return Answer.SILENT
    except (OSError, ValueError, OverflowError) as error:
        return Answer.SILENT if getattr(error, "errno", None) in SILENCE else Answer.UNKNOWN
    writer.close()
    return Answer.LISTENS
