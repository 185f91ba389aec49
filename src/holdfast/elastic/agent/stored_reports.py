"""The workers' events on their way into the journal, without a worker that waits for the disk.

A worker's report is answered within `STORE_TIMEOUT_S`, whatever the disk does. Otherwise nothing
would be heard of its progress while a disk hangs, and it would count as hung itself. The answer
says up to which number the worker's events are durable. So events of a report that was answered
before count as soon as a slow disk has taken them.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from holdfast.elastic.event_log import EventLog

STORE_TIMEOUT_S = 1.0
"""Seconds that a worker's report waits for the journal; a hung worker is named after more. Reports
that follow do not wait for a disk that has not answered for so long."""


@dataclass
class _RankEvents:
    """Events of one rank of a generation: all with a lower number are taken, stored, durable."""

    taken: int = 0
    stored: int = 0
    durable: int = 0
    flush: asyncio.Task[bool] | None = None
    flush_began_at: float = 0.0


class StoredReports:
    """What the journal has of the workers' events. Lives in one event loop."""

    def __init__(self, event_log: EventLog) -> None:
        self._event_log = event_log
        self._generation = 0
        self._ranks: dict[int, _RankEvents] = {}

    async def store(self, generation: int, rank: int, next_number: int, sync: bool) -> bool:
        """Store what a rank's reports brought; return True if the journal has it in time.

        next_number: that of the rank's first event that no report has brought yet. sync: the
        journal must have it durably."""
        if generation != self._generation:
            self._generation, self._ranks = generation, {}
        events = self._ranks.setdefault(rank, _RankEvents())
        events.taken = max(events.taken, next_number)
        clock = asyncio.get_running_loop().time
        has_tried = False
        while (events.durable if sync else events.stored) < next_number:
            if events.flush is None or events.flush.done():
                if has_tried:
                    return False
                events.flush, has_tried = asyncio.create_task(self._flush(events, rank, sync)), True
                events.flush_began_at = clock()
            left = events.flush_began_at + STORE_TIMEOUT_S - clock()
            await asyncio.wait({events.flush}, timeout=max(0.0, left))
            if not events.flush.done():
                return False
            events.flush.result()  # raises for a bug of ours
        return True

    def durable_below(self, generation: int, rank: int) -> int:
        """Return the number below which all events of a rank are durable."""
        events = self._ranks.get(rank) if generation == self._generation else None
        return 0 if events is None else events.durable

    async def _flush(self, events: _RankEvents, rank: int, sync: bool) -> bool:
        number = events.taken
        is_stored = await self._event_log.flush(f"rank{rank}", sync)
        if is_stored:
            events.stored = max(events.stored, number)
            events.durable = max(events.durable, number) if sync else events.durable
        return is_stored
