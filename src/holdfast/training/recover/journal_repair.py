"""Events that the journal lacks of a step that the survivors of a loss applied.

A rank that applies a step in a recovery has not reported it. Rank 0 may be lost before it reports
the last few steps and the newest validation. Another rank that computed them reports them once
more, and readers count each once (`core.data.lineage.DuplicateFilter`).

A lost rank may not have entered into the ledger what it fed. The agent adds those entries
(`elastic/coordinator/ledger_repair.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.events import BatchFed, Event, StepDone
from holdfast.training.engine.engine import StepEngine
from holdfast.training.engine.step_status import REMEMBERED_STEPS
from holdfast.training.recover.recovery_agreement import Agreement


def entries_of_open_step(engine: StepEngine) -> list[dict[str, Any]]:
    """Return the ledger's entries of what this rank was fed in the open step, if it feeds the
    ledger."""
    if not engine.groups.feeds_ledger:
        return []
    return [entry for batch in engine.batches for entry in getattr(batch, "entries", ())]


def missing_events(
    entries: list[dict[str, Any]], agreement: Agreement, engine: StepEngine
) -> list[Event]:
    """What this rank of the new generation has to report. entries: `entries_of_open_step` of the
    generation that is over."""
    rank, step, events = engine.groups.rank, agreement.resolution.step, list[Event]()
    if entries and rank in agreement.resolution.appliers:
        events.append(BatchFed(rank, entries, step=step))
    survivors = [r for r, was in enumerate(agreement.came_from) if was is not None]
    lived = 0 in agreement.came_from
    teller = agreement.came_from.index(0) if lived else _first_reporter(survivors, agreement)
    quiet = rank in agreement.resolution.appliers or engine.history.unreported_step == step
    if rank == teller and (quiet or not lived):
        events += _step_events(engine, agreement, 1 if lived else REMEMBERED_STEPS)
    newest, told = engine.history.last_validation, lived and teller in agreement.validators
    if newest is not None and newest.step > step - REMEMBERED_STEPS and not told:
        events += [newest] * (rank in agreement.validators[:1])
    return events


def _first_reporter(survivors: Sequence[int], agreement: Agreement) -> int:
    """Return the rank that reports the last steps for a lost rank 0: one that applied them."""
    return next((r for r in survivors if r not in agreement.resolution.receivers), survivors[0])


def _step_events(engine: StepEngine, agreement: Agreement, max_steps: int) -> list[Event]:
    """Return the last `max_steps` steps that this rank knows of. Some may have been reported
    before."""
    step = agreement.resolution.step
    voted = {} if agreement.verdict is None else {step: agreement.verdict}
    voted.update(engine.history.applied_verdicts)  # with their loss scales
    return [
        StepDone(
            loss=verdict.mean_loss,
            tokens=verdict.tokens,
            grad_norm=verdict.mean_norm,
            learning_rate=engine.learning_rate(number),
            seconds=0.0,
            samples=engine.plan.samples(number),
            phases={},
            skipped_at=verdict.skipped_at,
            step=number,
        )
        for number, verdict in sorted(voted.items())
        if step - max_steps < number <= step
    ]
