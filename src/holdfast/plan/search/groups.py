"""Groups of layouts that a search has not opened, by the least score that any of them can have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count
from math import inf

from holdfast.plan.cost.choice import Choice, ReplicaChoice
from holdfast.plan.cost.evaluate import Problem
from holdfast.plan.cost.pipeline_time import kept_microbatches
from holdfast.plan.search.bounds import Bounds
from holdfast.plan.search.candidates import Scores
from holdfast.plan.search.fleets import Family
from holdfast.plan.search.layouts import Variant, choice_of
from holdfast.plan.search.room import Room
from holdfast.plan.search.space import Cut, Shape


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
        shape, one, most = group.shape, group.variants[0], self.most_microbatches(group)
        kept = kept_microbatches(one.schedule, shape.pp, one.virtual, most)
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
        shape, one, most = group.shape, group.variants[0], self.most_microbatches(group)
        seconds = self.bounds.least_seconds(shape.cut, shape.slots, one.schedule, one.virtual, most)
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


@dataclass(frozen=True, slots=True)
class Piped:
    """Layouts with this pipeline and schedule, of any number of shards."""

    cut: Cut
    slots: tuple[int, ...]
    schedule: str
    virtual: int


@dataclass(frozen=True, slots=True)
class Scheduled:
    """Layouts of so many replicas of one shape, under one schedule."""

    shape: Shape
    variants: tuple[Variant, ...]
    number: int  # of replicas
    fewer: list[int]  # numbers that follow
    seconds: float = 0.0  # that the passes of any variant take at least
    is_fitted: bool = False  # only variants are left that may fit


Group = Cut | Piped | Scheduled | Family


@dataclass
class Groups:
    """A heap. fitted: makes a group fitted, or returns None if nothing of it can fit; with its
    score and its seconds. Only groups that come to the top are fitted: few do, and it takes long.
    """

    fitted: Callable[[Scheduled], tuple[float, float, Scheduled] | None]
    _heap: list[tuple[float, float, int, Group]] = field(default_factory=list)
    _order: count[int] = field(default_factory=count)

    @property
    def least(self) -> float:
        """The least score of a group; inf if there is none."""
        heap = self._heap
        while heap:
            group = heap[0][3]
            if not isinstance(group, Scheduled) or group.is_fitted:
                return heap[0][0]
            heappop(heap)
            found = self.fitted(group)
            if found is not None:
                self.push(*found)
        return inf

    def push(self, score: float, seconds: float, group: Group) -> None:
        """seconds: of groups with the same score, the fastest comes first."""
        heappush(self._heap, (score, seconds, next(self._order), group))

    def pop(self) -> Group:
        """Return the group with the least score. There must be one: see `least`."""
        return heappop(self._heap)[3]

    def clear(self) -> None:
        self._heap.clear()
