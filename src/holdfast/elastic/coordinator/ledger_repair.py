"""Rebuilds ledger entries that lost workers never delivered, and marks them as reconstructed.

When survivors continue from their own state, all steps up to that state count. A lost worker sends
its ledger from a background thread, so the entries of its last steps may be missing. Only the agent
knows which entries arrived. Once every worker of the next generation is ready, the survivors have
sent all their entries. The agent then rebuilds missing entries up to that generation's start step
from the data, and marks them (`core.data.data_ledger.STAND_IN_KEY`). Known entries are kept as
ranges of positions: a handful of numbers, however long the run.

Survivors that hold the complete gradient of the step after the start step apply it as they recover.
A lost worker may have fed its part of that step, so the step counts as soon as it is reported.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left

from holdfast.config.run import RunConfig
from holdfast.core.data.data_ledger import Range, merge_ranges, uncovered_ranges
from holdfast.core.data.sample_order import BatchSchedule
from holdfast.core.data.skips import Skips
from holdfast.elastic.event_log import EventLog, Say
from holdfast.errors import HoldfastError
from holdfast.events import BatchFed, Event, GenerationStarted, StepDone
from holdfast.tasks.task.ask import run_entries
from holdfast.wire.journal import JournalTail

NO_RANK = -1
"""The rank in rebuilt entries, which belong to no rank's training."""


class LedgerCoverage:
    """Coverage of the sample order by ledger entries that count; `observe` needs every event.

    If a run begins from a snapshot or checkpoint, entries before it are not required. The same
    holds for a later generation if snapshots are announced after the ledger of their steps.
    """

    def __init__(self, config: RunConfig, snapshots_follow_ledger: bool = True) -> None:
        self._snapshots_follow_ledger, self._is_first_generation = snapshots_follow_ledger, True
        stages = [(stage.from_step, stage.batch_size) for stage in config.train.batch_warmup]
        self._config = config
        self._schedule = BatchSchedule(config.step_train.batch_size, stages)
        self._ranges: list[Range] = []
        self._complete_until = 0  # no entry is missing before this position
        self._start_step = 0  # the step that the newest generation began from
        self._last_step = 0  # the same, or the step after it once that is done
        self.skips = Skips()
        """Microbatches that are left out of the run's data."""

    def observe(self, event: Event) -> None:
        if isinstance(event, GenerationStarted):
            # Steps beyond that are repeated.
            self._start_step = self._last_step = event.step
            end = self.end_position
            self._ranges = [(low, min(high, end)) for low, high in self._ranges if low < end]
            if event.came_from is None and (
                self._snapshots_follow_ledger or self._is_first_generation
            ):
                self._complete_until = end
            self._is_first_generation = False
        elif isinstance(event, StepDone) and event.step == self._start_step + 1:
            self._last_step = event.step
        elif isinstance(event, BatchFed):
            for entry in event.entries:
                self._add_range(int(entry["start"]), int(entry["stop"]))

    @property
    def end_position(self) -> int:
        """The position before which every entry is required now."""
        return self._schedule.position(self._last_step + 1)

    def _add_range(self, start: int, stop: int) -> None:
        """Add a range. Ranges come nearly in order, so only the end of a short list changes."""
        at = max(0, bisect_left(self._ranges, (start, start)) - 1)
        self._ranges[at:] = merge_ranges([*self._ranges[at:], (start, stop)])

    def find_missing(self) -> list[Range]:
        """Return the positions that no ledger entry covers, up to the newest generation's start
        step, or the step that survivors applied after it."""
        return uncovered_ranges(self._ranges, self._complete_until, self.end_position)

    def mark_complete(self, until: int) -> None:
        """Require no entries before position `until`: they were rebuilt, or cannot be."""
        self._complete_until = max(self._complete_until, until)

    def make_entries(self, missing: list[Range]) -> list[BatchFed]:
        """Return entries for these positions, by step; reads the data. Raises HoldfastError."""
        found = run_entries(self._config, self.skips, missing, self._last_step)
        return [BatchFed(NO_RANK, entries, step=step) for step, entries in found]


class LedgerRepair:
    """Rebuilds missing ledger entries during training, once for each generation that continues
    from live state."""

    def __init__(
        self, ledger_coverage: LedgerCoverage, event_log: EventLog, say: Say, retry_delay_s: float
    ) -> None:
        """retry_delay_s: seconds before a journal that cannot be written is tried again."""
        self.is_pending = False
        """True if entries may be missing: no snapshot is announced before its ledger."""
        self._last_problem = ""  # why the journal could not be read
        self._ledger_coverage = ledger_coverage
        self._event_log = event_log
        self._say = say
        self._retry_delay_s = retry_delay_s

    async def repair(self) -> None:
        """Rebuild and store missing entries, after all workers have sent theirs."""
        if not self.is_pending:
            return
        await self._rebuild_missing("the ledger lacks the batches of lost workers")
        while not await self._event_log.flush("agent", sync=True):
            await asyncio.sleep(self._retry_delay_s)
        self.is_pending = False

    async def repair_from_journal(self, journal_tail: JournalTail) -> None:
        """Rebuild missing entries of a run of several nodes, whose entries the journal has.

        Entries that are still missing up to the start step belonged to lost workers. A journal that
        cannot be read is tried again, because the run store may be away for a while."""
        while (problem := await self._read_journal(journal_tail)) is not None:
            if problem != self._last_problem:
                self._last_problem = problem
                self._say(f"the ledger of a lost node waits for the journal: {problem}")
            await asyncio.sleep(self._retry_delay_s)
        await self._rebuild_missing("the ledger entries of a lost node cannot be rebuilt")

    async def _rebuild_missing(self, failure: str) -> None:
        """Emit the entries that are missing so far. failure: says that they cannot be made."""
        missing, until = self._ledger_coverage.find_missing(), self._ledger_coverage.end_position
        try:
            if missing:
                for event in await asyncio.to_thread(self._ledger_coverage.make_entries, missing):
                    self._event_log.emit("agent", event)
        except HoldfastError as error:
            self._say(f"{failure}: {error}")
        self._ledger_coverage.mark_complete(until)

    async def _read_journal(self, journal_tail: JournalTail) -> str | None:
        """Take the entries that the journal has; return why it cannot be read, None if it can."""
        await self._event_log.flush(at_once=True)
        try:
            records = await asyncio.to_thread(journal_tail.read_new)
        except HoldfastError as error:
            return str(error)
        for record in records:
            self._ledger_coverage.observe(record.event)
        return None
