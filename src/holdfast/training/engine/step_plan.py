"""The microbatches of a step that each replica of the present generation computes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from holdfast.config.sections.train import TrainConfig
from holdfast.core.data.sample_order import BatchSchedule
from holdfast.core.sharding.reduction_tree import Shares
from holdfast.core.sharding.step_resume import Computed, deal_away_from
from holdfast.parallel.axes.process_groups import ProcessGroups

Dealer = Callable[[int, int], Shares]
"""(microbatches of a step, replicas) -> who computes which."""


@dataclass(frozen=True)
class ResumedStep:
    """A step that continues: how it is dealt now, and what each replica has of it."""

    step: int
    shares: Shares
    computed: Computed


class StepPlan:
    """The sizes of all steps, and how each is dealt to the replicas.

    groups: of the present generation. dealer: who computes which microbatch; every rank must be
    given the same. One step may differ from it: one that is resumed, or dealt elsewhere. is_fixed:
    none does, because a replica has state that its share needs.
    """

    def __init__(
        self, train: TrainConfig, groups: ProcessGroups, dealer: Dealer, is_fixed: bool = False
    ):
        self._groups, self._dealer, self.is_fixed = groups, dealer, is_fixed
        self._microbatch_size = train.microbatch_size
        self._schedule = BatchSchedule(
            train.batch_size, [(s.from_step, s.batch_size) for s in train.batch_warmup]
        )
        self._resumed_step: ResumedStep | None = None

    def leaves(self, step: int) -> int:
        """Logical microbatches of a step."""
        return self._schedule.size(step) // self._microbatch_size

    def samples(self, step: int) -> int:
        """Samples of a step's global batch."""
        return self._schedule.size(step)

    def shares(self, step: int) -> Shares:
        """Return the microbatches that each replica computes in a step, each in rising order."""
        if self._resumed_step is not None and self._resumed_step.step == step:
            return self._resumed_step.shares
        dealt = self._dealer(self.leaves(step), self._groups.replica_count)
        return tuple(tuple(sorted(share)) for share in dealt)

    def share(self, step: int) -> tuple[int, ...]:
        """The microbatches of a step that this rank's replica computes."""
        return self.shares(step)[self._groups.coordinate.replica]

    def computed_by_replica(self, step: int) -> Computed:
        """The microbatches of a resumed step that each replica need not compute again."""
        resumed = self._resumed_step
        return resumed.computed if resumed is not None and resumed.step == step else ()

    def resume(self, step: int, shares: Shares, computed: Computed) -> None:
        """Let `step` continue when it begins. It is dealt as in `shares`; the replicas have
        `computed_leaves` some of it, and those of this one have kept their part."""
        self._resumed_step = ResumedStep(step, shares, computed)

    def deal_elsewhere(self, step: int, avoid: Mapping[int, Collection[int]]) -> None:
        """Move the microbatches in `avoid` away from the replicas listed there when `step`
        begins, if other replicas can take them. Every rank must receive the same. A resumed step
        is not changed."""
        if self._resumed_step is None and not self.is_fixed:
            self._resumed_step = ResumedStep(step, deal_away_from(self.shares(step), avoid), ())

    def regroup(self, groups: ProcessGroups, dealer: Dealer) -> None:
        """Deal to other replicas from now on. What was resumed among the old ones is forgotten."""
        self._groups, self._dealer, self._resumed_step = groups, dealer, None
