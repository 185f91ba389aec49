"""Least scores of layouts of one shape under one schedule, and which of them may fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from holdfast.plan.cost.choice import Choice, ReplicaChoice
from holdfast.plan.cost.evaluate import Problem
from holdfast.plan.cost.least_pipeline_time import kept_microbatches
from holdfast.plan.search.bounds import Bounds
from holdfast.plan.search.groups import Scheduled
from holdfast.plan.search.layouts import Variant, choice_of
from holdfast.plan.search.room import Room
from holdfast.plan.search.scores import Scores
from holdfast.plan.search.space import Shape


@dataclass
class Fitting:
    """Gives groups their scores."""

    problem: Problem
    scores: Scores
    bounds: Bounds
    room: Room

    def fitted(self, group: Scheduled) -> tuple[float, float, Scheduled] | None:
        """Return the group with the variants that may fit; None if none does. The score comes
        first, then the seconds. They count the recompute that the variants need."""
        shape, piped, most = group.shape, group.piped, self.most_microbatches(group)
        kept = kept_microbatches(piped.schedule, shape.pp, piped.virtual, most)
        found = list[tuple[float, Variant]]()
        for variant in group.variants:
            rooms = self.room.by_word(shape, variant.zero, kept, most)
            if rooms:
                own = self.bounds.least_recomputed(shape, variant, most, rooms, group.seconds)
                found.append((own, variant))
        if not found:  # nor does any with fewer replicas, which keep no less
            return None
        variants = tuple(variant for _, variant in found)
        return *self._least(group, found), replace(group, variants=variants, is_fitted=True)

    def scored(self, group: Scheduled) -> tuple[float, float, Scheduled]:
        """Return the group with its score and its seconds, whether it fits or not."""
        piped, most = group.piped, self.most_microbatches(group)
        seconds = self.bounds.least_seconds(
            piped.cut, piped.slots, piped.schedule, piped.virtual, most
        )
        passes = [(seconds, variant) for variant in group.variants]
        return *self._least(group, passes), replace(group, seconds=seconds)

    def most_microbatches(self, group: Scheduled) -> int:
        """Of a replica."""
        return -(-self.problem.workload.batch // group.shape.microbatch // group.number)

    def _least(
        self, group: Scheduled, passes: Sequence[tuple[float, Variant]]
    ) -> tuple[float, float]:
        """The least score and its seconds. passes: seconds of the variants, without a tail."""
        scores, microbatches = list[tuple[float, float]](), self.most_microbatches(group)
        for least, variant in passes:
            seconds = least + self.bounds.least_tail(group.shape, variant)
            if self.scores.is_time:
                scores.append((seconds, seconds))
            else:
                alike = replicas_of(group.shape, variant, group.number, microbatches)
                scores.append((self.scores.of_replicas(seconds, alike), seconds))
        return min(scores)


def replicas_of(shape: Shape, variant: Variant, number: int, microbatches: int) -> Choice:
    """A layout of so many replicas, without stages."""
    return choice_of(variant, (ReplicaChoice(number, *shape.mesh, (), shape.pools, microbatches),))
