"""The ledger of those who are gone: entries that they did not live to tell are made again.

Where the survivors of a loss go on with the state that they hold, the steps that it stands after
count, whoever was lost meanwhile; and a worker's ledger travels on a thread of its own, so that of
its last steps may have been lost with it. Only the agent knows what has been told. Once every
worker of the next generation is ready, the others have told what they still had to tell; what is
missing then, up to the step that the generation began from, is made from the data and marked
(`core.data.data_ledger.STANDS_IN`). What is known is kept as ranges of positions, which is a
handful of numbers however long the run.
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
"""The rank of entries that nobody's model was fed by."""


class Told:
    """Which positions of the sample order have a ledger entry that counts. Feed it every event.

    Where a run begins from a snapshot or checkpoint, nothing before it is asked for; nor where a
    later generation does so, if snapshots are announced behind the ledger of their steps.
    """

    def __init__(self, config: RunConfig, announced_behind: bool = True) -> None:
        self._behind, self._first = announced_behind, True
        stages = [(stage.from_step, stage.batch_size) for stage in config.train.batch_warmup]
        self._config = config
        self._schedule = BatchSchedule(config.train.batch_size, stages)
        self._ranges: list[Range] = []
        self._whole = 0  # nothing is missing before this position
        self._start = 0  # the step that the newest generation began from
        self.skips = Skips()
        """What is left out of the run's data."""

    def observe(self, event: Event) -> None:
        if isinstance(event, GenerationStarted):
            # What was done beyond that is done again.
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
        """They come nearly in order: the list stays short, and its end is looked at."""
        at = max(0, bisect_left(self._ranges, (start, start)) - 1)
        self._ranges[at:] = merge([*self._ranges[at:], (start, stop)])

    def missing(self) -> list[Range]:
        """Positions up to the newest start of which nobody told."""
        return gaps(self._ranges, self._whole, self._end)

    def settled(self) -> None:
        """What was missing has been made, or cannot be."""
        self._whole = max(self._whole, self._end)

    def made(self, missing: list[Range]) -> list[BatchFed]:
        """Entries for these positions, by step; reads the dataset. Raises HoldfastError."""
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
    """Makes the missing part of the ledger behind the training, once for each generation that goes
    on live."""

    def __init__(self, told: Told, board: Board, say: Say, pause: float) -> None:
        """pause: seconds before a journal that cannot be written is tried again."""
        self.owing = False
        """Whether something may be missing: no snapshot is announced before its ledger."""
        self._told, self._board, self._say, self._pause = told, board, say, pause

    async def make(self) -> None:
        """Everybody has told what he still had to tell."""
        if not self.owing:
            return
        missing = self._told.missing()
        try:
            for event in await asyncio.to_thread(self._told.made, missing) if missing else ():
                self._board.emit("agent", event)
        except HoldfastError as error:
            self._say(f"the ledger lacks what lost workers were fed: {error}")
        self._told.settled()
        while not await self._board.flush("agent", sync=True):
            await asyncio.sleep(self._pause)
        self.owing = False


def _entries(batches: Batches, step: int, start: int, stop: int) -> Iterator[dict[str, Any]]:
    """For samples [start, stop) of a step: by microbatch, in shares as dp_shard may cut them."""
    size = batches.microbatch_size
    while start < stop:
        index, offset = divmod(start, size)
        share = gcd(size, min(stop - start, size - offset), offset)
        yield from batches.microbatch(step, index, offset // share, size // share).entries
        start += share
