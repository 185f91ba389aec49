"""Events that the journal lacks of a step that the survivors of a loss applied.

A rank that applies a step in a recovery has not reported it. Rank 0 may be lost before it reports
the last few steps and the newest validation. Another rank that computed them reports them once
more, and readers count each once (`core.data.lineage.DuplicateFilter`).

A lost rank may not have entered into the ledger what it fed. Its entries are made again from the
data, and marked, so that an audit does not count them twice if its own came after all.
Ledgers travel on a thread of their own and may lag behind, so the last few steps are covered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.core.data.data_ledger import STAND_IN_KEY
from holdfast.core.lr_schedule import learning_rate
from holdfast.core.sharding.reduction_tree import Shares
from holdfast.data.batch import Batches
from holdfast.events import BatchFed, Event, StepDone
from holdfast.layout import Topology
from holdfast.train.engine import StepEngine
from holdfast.train.recovery_agreement import Agreement
from holdfast.train.step_status import REMEMBERED_STEPS

COVERED_STEPS = 3  # steps back from the newest whose ledger a lost rank may not have handed over


@dataclass(frozen=True)
class FinishedGeneration:
    """What a survivor remembers of the generation that is over. first_step: its first step, 0 where
    none was begun."""

    topology: Topology
    rank: int
    feeds_ledger: bool
    shares: Callable[[int], Shares]
    first_step: int
    step: int  # that was open, or was last
    entries: list[dict[str, Any]]  # of what was fed in it

    @staticmethod
    def from_engine(engine: StepEngine) -> FinishedGeneration:
        groups = engine.groups
        entries = [entry for batch in engine.batches for entry in getattr(batch, "entries", ())]
        return FinishedGeneration(
            groups.topology,
            groups.rank,
            groups.feeds_ledger,
            engine.plan.share_function(),
            engine.first_step,
            engine.step,
            entries,
        )


def missing_events(
    past: FinishedGeneration | None,
    agreement: Agreement,
    engine: StepEngine,
    batches: Batches | None,
) -> list[Event]:
    """What this rank of the new generation has to report. past: None for a newcomer."""
    rank, step, events = engine.groups.rank, agreement.resolution.step, list[Event]()
    if past is not None and rank in agreement.resolution.appliers and past.feeds_ledger:
        events.append(BatchFed(rank, past.entries, step=step))
    survivors = [r for r, was in enumerate(agreement.came_from) if was is not None]
    if past is not None and batches is not None and rank == survivors[0]:
        events += _stand_in_events(past, agreement, rank, batches)
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
    voted = dict(engine.history.applied_verdicts)
    if agreement.verdict is not None:
        voted[step] = agreement.verdict
    return [
        StepDone(
            loss=verdict.mean_loss,
            tokens=verdict.tokens,
            grad_norm=verdict.mean_norm,
            learning_rate=learning_rate(engine.train, number),
            seconds=0.0,
            samples=engine.plan.samples(number),
            phases={},
            step=number,
        )
        for number, verdict in sorted(voted.items())
        if step - max_steps < number <= step
    ]


def _stand_in_events(
    past: FinishedGeneration, agreement: Agreement, rank: int, batches: Batches
) -> list[Event]:
    """Return the ledger of the lost ranks. In a generation that began no step they fed nothing.
    What they fed before could be handed over during the agreement."""
    if not past.first_step:
        return []
    here = {was for was in agreement.came_from if was is not None}
    step = agreement.resolution.step
    events: list[Event] = []
    for number in range(max(past.first_step, step - COVERED_STEPS + 1), step + 1):
        shares, entries = past.shares(number), list[dict[str, Any]]()
        for replica in past.topology.replicas:
            parts = replica.degree("dp_shard")
            for part in range(parts):
                if replica.rank_at(dp_shard=part) in here:
                    continue
                for leaf in sorted(shares[replica.index]):
                    made = batches.microbatch(number, leaf, part, parts)
                    entries += [{**entry, STAND_IN_KEY: True} for entry in made.entries]
        if entries:
            events.append(BatchFed(rank, entries, step=number))
    return events
