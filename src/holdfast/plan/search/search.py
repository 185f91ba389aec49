"""The best layout of a run on a cluster.

The search keeps a heap of layouts and of groups of layouts, by the least score that any of them can
have. It opens the first of the heap: degrees become numbers of replicas and schedules, these become
complete layouts, and of a complete layout the schedule's timeline is executed. Once the first of
the heap cannot beat the best layout so far, no layout can. So the answer is that of an exhaustive
search, and few timelines are executed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count
from math import inf

from holdfast.config.pipeline_schedules import SCHEDULE_KINDS
from holdfast.plan.cost.choice import Choice, ReplicaChoice
from holdfast.plan.cost.evaluate import Evaluator, Problem
from holdfast.plan.cost.least_pipeline_time import kept_microbatches
from holdfast.plan.search.bounds import Bounds
from holdfast.plan.search.layouts import Layouts, Shares, Variant, choice_of
from holdfast.plan.search.limits import (
    Found,
    Limits,
    Objective,
    SearchResult,
    step_seconds,
)
from holdfast.plan.search.nearest import nothing_fits_error
from holdfast.plan.search.room import Room
from holdfast.plan.search.space import (
    Shape,
    Site,
    microbatches,
    shapes,
    virtual_stages,
)

__all__ = ["Found", "Limits", "Objective", "SearchResult", "search", "step_seconds"]

_RUNNERS_UP = 8


def search(
    problem: Problem,
    limits: Limits | None = None,
    objective: Objective = step_seconds,
    first: Choice | None = None,
) -> SearchResult:
    """Return the best layout. first: one that is likely to be good, of an earlier search.

    Raises LayoutError if nothing fits, with the nearest that would.
    """
    return Search(problem, limits or Limits(), objective).run(first)


@dataclass
class Search:
    """One search."""

    problem: Problem
    limits: Limits
    objective: Objective
    evaluator: Evaluator = field(init=False)
    best: Found | None = None
    _found: list[Found] = field(default_factory=list)
    _heap: list[tuple[float, int, object]] = field(default_factory=list)
    _order: Iterator[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        self.evaluator = Evaluator(self.problem)
        self._bounds = Bounds(self.evaluator, self.limits.recompute)
        self._layouts = Layouts(self.evaluator, self.limits)
        self._room = Room(self.evaluator, self.limits)
        self._pushed = 0

    def run(self, first: Choice | None) -> SearchResult:
        if first is not None and not self.evaluator.short_of(first):
            self._execute(first)
        self._push_degrees()
        while self._heap and self._heap[0][0] < self._least():
            self._open(heappop(self._heap)[2])
        if self.best is None:
            raise nothing_fits_error(self.problem, self.limits)
        self._execute_runners_up()
        others = sorted(
            (each for each in self._found if each is not self.best), key=lambda each: each.score
        )
        best, tried = self.best, len(self._found)
        return SearchResult(best, tuple(others[:_RUNNERS_UP]), tried, self._pushed)

    def _least(self) -> float:
        return self.best.score if self.best else inf

    def _push(self, score: float, node: object) -> None:
        self._pushed += 1
        if score < self._least():
            heappush(self._heap, (score, next(self._order), node))

    def _push_degrees(self) -> None:
        for microbatch in microbatches(self.problem.workload, self.limits):
            for site in self.sites():
                for shape in shapes(self.problem, self.limits, site, microbatch):
                    if self._may_fit(shape, microbatch):
                        node = _Degrees(microbatch, shape)
                        self._push(self._score_of_degrees(node), node)

    def _may_fit(self, shape: Shape, microbatch: int) -> bool:
        if len(shape.site.pools) > 1:
            half = [0.5] * shape.pp
            return any(self._room.can_fit(shape, microbatch, z, half) for z in self.limits.zero)
        return any(
            self._room.shortest(shape, microbatch, zero) <= shape.pp for zero in self.limits.zero
        )

    def sites(self) -> list[Site]:
        """Pools that may hold all replicas."""
        return [
            Site((pool.name,), (pool.size,), pool.devices) for pool in self.problem.cluster.pools
        ]

    def _open(self, node: object) -> None:
        if isinstance(node, Choice):
            self._execute(node)
        elif isinstance(node, _Scheduled):
            self._open_scheduled(node)
        elif isinstance(node, _Degrees):
            self._open_degrees(node)

    def _open_degrees(self, node: _Degrees) -> None:
        shape, blocks = node.shape, len(self.problem.workload.blocks)
        schedules = self.limits.schedules if shape.pp > 1 else self.limits.schedules[:1]
        numbers = self._numbers_of_replicas(node)
        for schedule in schedules:
            for virtual in virtual_stages(schedule, self.limits, blocks, shape.pp):
                self._push_numbers(node, schedule, virtual, numbers)

    def _push_numbers(
        self, node: _Degrees, schedule: str, virtual: int, numbers: list[int]
    ) -> None:
        """With fewer replicas a step takes longer. So they wait until the first one is opened."""
        if self.objective is not step_seconds:
            for number in numbers:
                self._push_scheduled(node, schedule, virtual, [number])
        elif numbers:
            self._push_scheduled(node, schedule, virtual, numbers)

    def _push_scheduled(
        self, node: _Degrees, schedule: str, virtual: int, numbers: list[int]
    ) -> None:
        """The first number of replicas with which the schedule runs and a replica may fit."""
        shape, total = node.shape, self.problem.workload.batch // node.microbatch
        for place, number in enumerate(numbers):
            each = total // number
            if each < SCHEDULE_KINDS[schedule].least_microbatches(shape.pp):
                continue
            most = -(-total // number)
            kept = kept_microbatches(schedule, shape.pp, virtual, most)
            variants = self._layouts.variants([shape], node.microbatch, schedule, virtual)
            scores, fitting = list[float](), list[Variant]()
            for variant in variants:
                if self._room.can_fit(shape, node.microbatch, variant.zero, kept):
                    scores.append(self._score_of_variant(shape, variant, number, most, kept))
                    fitting.append(variant)
            if not fitting:
                return  # fewer replicas keep no less
            scheduled = _Scheduled(node, fitting, number, numbers[place + 1 :])
            self._push(min(scores), scheduled)
            return

    def _numbers_of_replicas(self, node: _Degrees) -> list[int]:
        """The most replicas, and the fewest that have no more than so many microbatches each."""
        total = self.problem.workload.batch // node.microbatch
        most = min(node.shape.most, total)
        if self.limits.replicas:
            return [self.limits.replicas] if self.limits.replicas <= most else []
        least = {-(-total // number) for number in range(1, most + 1)}
        return sorted({most, *(-(-total // each) for each in least)}, reverse=True)

    def _open_scheduled(self, node: _Scheduled) -> None:
        shape, one = node.degrees.shape, node.variants[0]
        if node.fewer:
            self._push_scheduled(node.degrees, one.schedule, one.virtual, node.fewer)
        each, more = divmod(self.problem.workload.batch // one.microbatch, node.number)
        most = Shares(shape, node.number, each + (more > 0))
        for variant in node.variants:
            for group in self._layouts.groups(variant, most, node.number):
                groups = tuple(_dealt(group, node.number, each, more))
                self._push_layout(choice_of(variant, groups))

    def _push_layout(self, choice: Choice) -> None:
        cost = self.evaluator.least(choice)
        if cost.fits:
            self._push(self.objective(choice, cost), choice)

    def _execute(self, choice: Choice) -> None:
        cost = self.evaluator.cost(choice)
        found = Found(choice, cost, self.objective(choice, cost))
        self._found.append(found)
        if found.score < self._least():
            self.best = found

    def _execute_runners_up(self) -> None:
        """The next layouts of the heap with degrees of their own."""
        seen = {_degrees_of(each.choice) for each in self._found}
        while self._heap and len(seen) <= _RUNNERS_UP:
            node = heappop(self._heap)[2]
            if isinstance(node, Choice) and _degrees_of(node) not in seen:
                seen.add(_degrees_of(node))
                self._execute(node)

    def _score_of_degrees(self, node: _Degrees) -> float:
        if self.objective is not step_seconds:
            return -inf
        shape, total = node.shape, self.problem.workload.batch // node.microbatch
        each = -(-total // min(shape.most, total))
        return self._bounds.least_busy(shape, node.microbatch, each)

    def _score_of_variant(
        self,
        shape: Shape,
        variant: Variant,
        number: int,
        microbatches: int,
        kept: Sequence[float],
    ) -> float:
        most = [
            self._room.most_blocks(shape, variant.microbatch, variant.zero, kept, word)
            for word in self._room.words(shape)
        ]
        seconds = self._bounds.least_scheduled(shape, variant, microbatches, most)
        if self.objective is step_seconds:
            return seconds
        least = getattr(self.objective, "least", None)
        if least is None:
            return -inf
        group = ReplicaChoice(number, *shape.mesh, (), shape.pools, microbatches)
        return float(least(choice_of(variant, (group,)), seconds))


@dataclass(frozen=True, slots=True)
class _Degrees:
    microbatch: int
    shape: Shape


@dataclass(frozen=True, slots=True)
class _Scheduled:
    """variants: that may fit. number: of replicas. fewer: numbers that follow."""

    degrees: _Degrees
    variants: list[Variant]
    number: int
    fewer: list[int]


def _dealt(group: ReplicaChoice, number: int, each: int, more: int) -> Iterator[ReplicaChoice]:
    """Replicas that share out the microbatches: `more` of them have one more than `each`."""
    if more:
        yield replace(group, count=more, microbatches=each + 1)
    yield replace(group, count=number - more, microbatches=each)


def _degrees_of(choice: Choice) -> object:
    return choice.microbatch, tuple((g.count, g.mesh_shape, g.pools) for g in choice.replicas)
