"""Waiting for an event of asyncio, with a bound."""

from __future__ import annotations

import asyncio
from contextlib import suppress


async def wait_event(event: asyncio.Event, seconds: float | None) -> bool:
    """Until it is set, or the time is over; whether it is set. None: however long it takes.

    `asyncio.wait_for` of Python 3.11 may take a cancellation for the event (cpython gh-86296), and
    who waits in a loop then never ends.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()
