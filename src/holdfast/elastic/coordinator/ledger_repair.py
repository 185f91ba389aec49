"""Rebuilds ledger entries that lost workers never delivered, and marks them as reconstructed.

When survivors continue from their own state, all steps up to that state count. A lost worker sends
its ledger from a background thread, so the entries of its last steps may be missing. Only the agent
knows which entries arrived. Once every worker of the next generation is ready, the survivors have
sent all their entries. The agent then rebuilds missing entries up to that generation's start step
from the data, and marks them (`core.data.data_ledger.STANDS_IN`). Known entries are kept as ranges
of positions: a handful of numbers, however long the run.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from math import gcd
from typing import TYPE_CHECKING, Any

from holdfast.config.run import RunConfig
from holdfast.core.data.data_ledger import STANDS_IN, Range, gaps, merge
from holdfast.core.data.sample_order import BatchSchedule
from holdfast.core.data.skips import Skips
from holdfast.elastic.event_log import Board, Say
from holdfast.errors import HoldfastError
from holdfast.events import BatchFed, Event, GenerationStarted

if TYPE_CHECKING:
    from holdfast.data.batch import Batches

AGENT = -1
"""The rank in rebuilt entries, which belong to no rank's training."""


class Told:
    """Coverage of the sample order by ledger entries that count; `observe` needs every event.

    If a run begins from a snapshot or checkpoint, entries before it are not required. The same
    holds for a later generation if snapshots are announced after the ledger of their steps.
    """

    def __init__(self, config: RunConfig, announced_behind: bool = True) -> None:
        self._behind, self._first = announced_behind, True
        stages = [(stage.from_step, stage.batch_size) for stage in config.train.batch_warmup]
        self._config = config
        self._schedule = BatchSchedule(config.train.batch_size, stages)
        self._ranges: list[Range] = []
        self._whole = 0  # no entry is missing before this position
        self._start = 0  # the step that the newest generation began from
        self.skips = Skips()
        """Microbatches that are left out of the run's data."""

    def observe(self, event: Event) -> None:
        if isinstance(event, GenerationStarted):
            # Steps beyond that are repeated.
            self._start = event.step
            end = self._end
            self._ranges = [(low, min(high, end)) for low, high in self._ranges if low < end]
            if event.came_from is None and (self._behind or self._first):
                self._whole = end
            self._first = False
        elif isinstance(event, BatchFed):
            for entry in event.entries:
                self._add(int(entry["start"]), int(entry["stop"]))

    @property
    def _end(self) -> int:
        return self._schedule.position(self._start + 1)

    def _add(self, start: int, stop: int) -> None:
        """Add a range. Ranges come nearly in order, so only the end of a short list changes."""
        at = max(0, bisect_left(self._ranges, (start, start)) - 1)
        self._ranges[at:] = merge([*self._ranges[at:], (start, stop)])

    def missing(self) -> list[Range]:
        """Return the positions up to the newest start that no ledger entry covers."""
        return gaps(self._ranges, self._whole, self._end)

    def settled(self) -> None:
        """Require no entries up to the newest start: they were rebuilt, or cannot be."""
        self._whole = max(self._whole, self._end)

    def made(self, missing: list[Range]) -> list[BatchFed]:
        """Return entries for these positions, by step; reads the dataset. Raises HoldfastError."""
        from holdfast.data.batch import Batches
        from holdfast.data.dataset import Dataset

        config, position = self._config, self._schedule.position
        dataset = Dataset.open(config.data.folder)
        batches = Batches(dataset, config.data, config.train, config.seed, self.skips)
        out: list[BatchFed] = []
        oldest = bisect_right(range(1, self._start + 1), missing[0][0], key=position)
        for step in range(max(1, oldest), self._start + 1):
            first, last = position(step), position(step + 1)
            parts = [(max(low, first), min(high, last)) for low, high in missing]
            entries = [
                {**entry, STANDS_IN: True}
                for low, high in parts
                if low < high
                for entry in _entries(batches, step, low - first, high - first)
            ]
            if entries:
                out.append(BatchFed(AGENT, entries, step=step))
        return out


class StandIn:
    """Rebuilds missing ledger entries during training, once for each generation that continues
    from live state."""

    def __init__(self, told: Told, board: Board, say: Say, pause: float) -> None:
        """pause: seconds before a journal that cannot be written is tried again."""
        self.owing = False
        """True if entries may be missing: no snapshot is announced before its ledger."""
        self._told, self._board, self._say, self._pause = told, board, say, pause

    async def make(self) -> None:
        """Rebuild and store missing entries, after all workers have sent theirs."""
        if not self.owing:
            return
        missing = self._told.missing()
        try:
            for event in await asyncio.to_thread(self._told.made, missing) if missing else ():
                self._board.emit("agent", event)
        except HoldfastError as error:
            self._say(f"the ledger lacks the batches of lost workers: {error}")
        self._told.settled()
        while not await self._board.flush("agent", sync=True):
            await asyncio.sleep(self._pause)
        self.owing = False


def _entries(batches: Batches, step: int, start: int, stop: int) -> Iterator[dict[str, Any]]:
    """Yield entries for samples [start, stop) of a step, by microbatch.

    The shares of a microbatch are cut as `dp_shard` may cut them."""
    size = batches.microbatch_size
    while start < stop:
        index, offset = divmod(start, size)
        share = gcd(size, min(stop - start, size - offset), offset)
        yield from batches.microbatch(step, index, offset // share, size // share).entries
        start += share
