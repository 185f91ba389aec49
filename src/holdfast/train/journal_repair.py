"""Events that the journal lacks of a step that the survivors of a loss applied.

A rank that applies a step in a recovery has not reported it. Rank 0 may be lost before it reports
the last few steps and the newest validation. Another rank that computed them reports them once
more, and readers count each once (`core.data.lineage.Once`).

A lost rank may not have entered into the ledger what it fed. Its entries are made again from the
data, and marked, so that an audit does not count them twice if its own came after all.
Ledgers travel on a thread of their own and may lag behind, so the last few steps are covered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.core.data.data_ledger import STANDS_IN
from holdfast.core.lr_schedule import learning_rate
from holdfast.core.sharding.reduction_tree import Shares
from holdfast.data.batch import Batches
from holdfast.events import BatchFed, Event, StepDone
from holdfast.layout import Topology
from holdfast.train.engine import LATELY, StepEngine
from holdfast.train.recovery_agreement import Agreement

COVERED = 3  # steps back from the newest whose ledger a lost rank may not have handed over


@dataclass(frozen=True)
class Past:
    """What a survivor remembers of the generation that is over. since: its first step, 0 where none
    was begun."""

    topology: Topology
    rank: int
    feeds: bool
    shares: Callable[[int], Shares]
    since: int
    step: int  # that was open, or was last
    entries: list[dict[str, Any]]  # of what was fed in it

    @staticmethod
    def of(engine: StepEngine) -> Past:
        groups = engine.groups
        entries = [entry for batch in engine.batches for entry in getattr(batch, "entries", ())]
        return Past(
            groups.topology, groups.rank, groups.feeds, engine.dealing(), engine.since, engine.step,
            entries,
        )  # fmt: skip


def missing_events(
    past: Past | None, found: Agreement, engine: StepEngine, batches: Batches | None
) -> list[Event]:
    """What this rank of the new generation has to report. past: None for a newcomer."""
    rank, step, events = engine.groups.rank, found.resolution.step, list[Event]()
    if past is not None and rank in found.resolution.appliers and past.feeds:
        events.append(BatchFed(rank, past.entries, step=step))
    survivors = [r for r, was in enumerate(found.came_from) if was is not None]
    if past is not None and batches is not None and rank == survivors[0]:
        events += _stand_ins(past, found, rank, batches)
    lived = 0 in found.came_from
    teller = found.came_from.index(0) if lived else _first(survivors, found)
    quiet = rank in found.resolution.appliers or engine.untold == step
    if rank == teller and (quiet or not lived):
        events += _steps(engine, found, 1 if lived else LATELY)
    newest, told = engine.validation, lived and teller in found.validators
    if newest is not None and newest.step > step - LATELY and not told:
        events += [newest] * (rank in found.validators[:1])
    return events


def _first(survivors: Sequence[int], found: Agreement) -> int:
    """Return the rank that reports the last steps for a lost rank 0: one that applied them."""
    return next((r for r in survivors if r not in found.resolution.behind), survivors[0])


def _steps(engine: StepEngine, found: Agreement, most: int) -> list[Event]:
    """Return the last `most` steps that this rank knows of. Some may have been reported before."""
    step = found.resolution.step
    voted = dict(engine.voted)
    if found.verdict is not None:
        voted[step] = found.verdict
    return [
        StepDone(
            loss=verdict.mean_loss, tokens=verdict.tokens, grad_norm=verdict.mean_norm,
            learning_rate=learning_rate(engine.train, number), seconds=0.0,
            samples=engine.samples(number), phases={}, step=number,
        )
        for number, verdict in sorted(voted.items())
        if step - most < number <= step
    ]  # fmt: skip


def _stand_ins(past: Past, found: Agreement, rank: int, batches: Batches) -> list[Event]:
    """Return the ledger of the lost ranks. In a generation that began no step they fed nothing.
    What they fed before could be handed over during the agreement."""
    if not past.since:
        return []
    here = {was for was in found.came_from if was is not None}
    step = found.resolution.step
    events: list[Event] = []
    for number in range(max(past.since, step - COVERED + 1), step + 1):
        shares, entries = past.shares(number), list[dict[str, Any]]()
        for replica in past.topology.replicas:
            parts = replica.degree("dp_shard")
            for part in range(parts):
                if replica.rank_at(dp_shard=part) in here:
                    continue
                for leaf in sorted(shares[replica.index]):
                    made = batches.microbatch(number, leaf, part, parts)
                    entries += [{**entry, STANDS_IN: True} for entry in made.entries]
        if entries:
            events.append(BatchFed(rank, entries, step=number))
    return events
