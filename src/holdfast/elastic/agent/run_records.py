"""The run's records: the journal that an agent writes, and its parts that learn from it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from holdfast.elastic.agent.run_progress import LearntProgress
from holdfast.elastic.coordinator.ledger_repair import LedgerCoverage
from holdfast.elastic.event_log import EventLog, Observer, Say
from holdfast.elastic.notices.handler import NoticeHandler
from holdfast.elastic.run_context import RunContext
from holdfast.errors import HoldfastError
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
        if alone:
            learn.append(lambda record: self.ledger_coverage.observe(record.event))
        self.event_log = EventLog(context.store, [*learn, *observers], say, context.node_suffix)
        self.progress = LearntProgress(self.event_log)

    async def load_earlier_sessions(self) -> None:
        """Learn the failures and save times of earlier sessions from the journal, if readable."""
        try:
            records = await asyncio.to_thread(read_journal, self._store)
        except HoldfastError as error:
            self._say(f"the run's earlier failures cannot be read from the journal: {error}")
            return
        for record in records:
            self.failure_history.observe(record)
            self.notice_handler.measurements.observe(record)
