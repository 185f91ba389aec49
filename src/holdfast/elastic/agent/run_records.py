"""The run's records: the journal that an agent writes, and its parts that learn from it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast.config.sections.train import StopRuleConfig
from holdfast.elastic.agent.best_checkpoints import BestCheckpoints
from holdfast.elastic.agent.pause_watch import PauseWatch
from holdfast.elastic.agent.spending_watch import SpendingWatch
from holdfast.elastic.coordinator.ledger_repair import LedgerCoverage
from holdfast.elastic.event_log import EventLog, Observer, Say
from holdfast.elastic.notices.handler import NoticeHandler
from holdfast.elastic.run_context import RunContext
from holdfast.errors import HoldfastError
from holdfast.events import (
    CheckpointCommitted,
    CheckpointFailed,
    Event,
    Record,
    SaveWaiting,
    StepDone,
)
from holdfast.policy.detection.stop_rules import StopDecision, StopRule, StopRules
from holdfast.policy.saving.failure_classes import FailureHistory
from holdfast.policy.saving.failure_rate import FailureRate
from holdfast.wire.journal import read_journal


class RunRecords:
    """The event log of one agent, and its observers: failures, save times, ledger, views."""

    def __init__(self, context: RunContext, observers: Sequence[Observer], say: Say) -> None:
        """observers: the user's views of the run, which learn after the agent's own parts."""
        config, alone = context.config, context.single_node_term is not None
        self._store, self._say = context.store, say
        self.failure_history = FailureHistory(
            FailureRate.from_prior(config.checkpoint.node_mtbf_hours * 3600)
        )
        self.notice_handler = NoticeHandler(
            config, lambda event: self.event_log.emit("agent", event), say
        )
        self.ledger_coverage = LedgerCoverage(config, snapshots_follow_ledger=alone)
        learn: list[Observer] = [self.failure_history.observe, self.notice_handler.observe]
        learn.append(lambda record: self.progress.observe(record))
        learn.append(self._apply_stop_rules)
        self.spending = SpendingWatch(
            context, lambda event: self.progress.emit_once_begun(event), say
        )
        learn.append(self.spending.observe)
        self.best = BestCheckpoints(context.store, config.checkpoint.keep_best, say)
        learn.append(self.best.observe)
        self.pausing = PauseWatch(
            config.pause,
            config.train.steps,
            lambda event: self.progress.emit_once_begun(event),
            say,
        )
        if alone:
            learn.append(lambda record: self.ledger_coverage.observe(record.event))
        self.event_log = EventLog(context.store, [*learn, *observers], say, context.node_suffix)
        self.progress = LearntProgress(self.event_log)
        self._stop_rules = StopRules([_rule(each) for each in config.train.stop])
        self.on_stop: Callable[[StopDecision], None] = lambda decision: None
        """Called when a rule of train.stop ends the run."""

    def _apply_stop_rules(self, record: Record) -> None:
        """Give a step of this session to the rules of train.stop."""
        if isinstance(event := record.event, StepDone) and (decision := self._judge(event)):
            self.on_stop(decision)

    def _judge(self, event: StepDone) -> StopDecision | None:
        values = {"loss": event.loss, "grad_norm": event.grad_norm, **event.metrics}
        return self._stop_rules.add(event.step, values)

    async def load_earlier_sessions(self) -> None:
        """Learn the failures and save times of earlier sessions from the journal, if readable."""
        try:
            records = await asyncio.to_thread(read_journal, self._store)
        except HoldfastError as error:
            self._say(f"the run's earlier failures cannot be read from the journal: {error}")
            return
        self.spending.load(records)
        self.pausing.load(records)
        self.best.load(records)
        for record in records:
            self.failure_history.observe(record)
            self.notice_handler.measurements.observe(record)
            if isinstance(record.event, StepDone):
                self._judge(record.event)


def _rule(config: StopRuleConfig) -> StopRule:
    limits = config.below, config.above, config.falls
    return StopRule(config.metric, config.steps, *limits, config.is_failure)


class LearntProgress:
    """The newest generation and the newest committed step that are known on this node."""

    def __init__(self, event_log: EventLog) -> None:
        self.newest_generation = 0
        self.has_stepped = False
        """True once a step was done in this session."""
        self._waiting_step = -1  # the run's last step while its save waits
        self._restored_step = 0
        self._committed_step = 0
        self._event_log = event_log

    @property
    def is_save_waiting(self) -> bool:
        """Return True while the run's last save waits for a run store that takes it."""
        return self._waiting_step >= 0

    @property
    def committed_step(self) -> int:
        """The newest committed step that this agent knows of."""
        return max(self._committed_step, self._restored_step)

    def on_restored(self, step: int) -> None:
        """Note the step of a checkpoint that a generation of this agent begins from."""
        self._restored_step = step

    def begin_generation(self, generation: int) -> None:
        """Refuse requests of generations older than this one from here on."""
        if generation > self.newest_generation:
            self.newest_generation = generation
            self._event_log.begin_generation(generation)

    def observe(self, record: Record) -> None:
        self.has_stepped = self.has_stepped or isinstance(record.event, StepDone)
        match record.event:
            case SaveWaiting(step=step):
                self._waiting_step = step
            case CheckpointCommitted(step=step) | CheckpointFailed(step=step):
                self._waiting_step = -1 if step >= self._waiting_step else self._waiting_step

    def on_mover_event(self, event: Event) -> None:
        """Note what the mover has committed, and emit its event."""
        if isinstance(event, CheckpointCommitted):
            self._committed_step = max(self._committed_step, event.step)
        if self.newest_generation:
            self._event_log.emit("mover", event)

    def emit_once_begun(self, event: Event) -> None:
        """Emit an event of the agent, once any generation has begun."""
        if self.newest_generation:
            self._event_log.emit("agent", event)


# The workers' events on their way into the journal, without a worker that waits for the disk.
#
# A worker's report is answered within `STORE_TIMEOUT_S`, whatever the disk does. Otherwise
# nothing would be heard of its progress while a disk hangs, and it would count as hung itself.
# The answer says up to which number the worker's events are durable. So events of a report that
# was answered before count as soon as a slow disk has taken them.

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
