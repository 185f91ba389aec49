"""Least scores of layouts, complete layouts that wait, and those whose timeline was executed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf

from holdfast.plan.cost.choice import Choice, ReplicaChoice
from holdfast.plan.cost.evaluate import Evaluator, Problem, StepCost
from holdfast.plan.search.limits import Found, Objective, step_seconds


@dataclass
class Scores:
    """Asks the objective for its `least`. Without one, groups have no bound."""

    problem: Problem
    objective: Objective
    _everywhere: dict[tuple[str, ...], Choice] = field(default_factory=dict)

    @property
    def is_time(self) -> bool:
        return self.objective is step_seconds

    @property
    def _least(self) -> Callable[[Choice, float], float] | None:
        return getattr(self.objective, "least", None)

    def of_pools(self, seconds: float, pools: tuple[str, ...]) -> float:
        """Return the least score for seconds on all devices of these pools. With fewer devices a
        step takes as many times longer at least."""
        if self.is_time:
            return seconds
        if self._least is None:
            return -inf
        if pools not in self._everywhere:
            groups = tuple(
                ReplicaChoice(pool.size, 1, 1, 1, 1, (), (pool.name,), 1)
                for pool in map(self.problem.cluster.pool, pools)
            )
            self._everywhere[pools] = Choice(groups, 1)
        return self._least(self._everywhere[pools], seconds)

    def of_replicas(self, seconds: float, choice: Choice) -> float:
        """Return the least score of a layout without stages."""
        if self.is_time:
            return seconds
        return -inf if self._least is None else self._least(choice, seconds)

    def of_layout(self, choice: Choice, cost: StepCost) -> float:
        """Return the least score of a layout whose timeline was not executed."""
        if not cost.fits:
            return inf
        if self._least is None:
            return self.objective(choice, cost)
        return self._least(choice, cost.step_s)


RUNNERS_UP = 8


@dataclass
class Candidates:
    """A heap of layouts by their least scores."""

    evaluator: Evaluator
    scores: Scores
    is_wanted: Callable[[Choice], bool]  # False for layouts that are left out
    ceiling: float = inf  # a score that is known already
    best: Found | None = None
    executed: list[Found] = field(default_factory=list)  # in the order of execution
    pushed: int = 0  # layouts that got a bound
    _heap: list[tuple[float, int, Choice]] = field(default_factory=list)

    @property
    def best_score(self) -> float:
        return self.best.score if self.best else self.ceiling

    @property
    def least(self) -> float:
        """The least score that a waiting layout may have; inf if none waits."""
        return self._heap[0][0] if self._heap else inf

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, choice: Choice, *, even_if_worse: bool = False) -> None:
        """Add a layout. It is dropped if it is not wanted, does not fit, or cannot be the best."""
        self.pushed += 1
        limit = inf if even_if_worse else self.best_score
        if self.scores.of_replicas(self.evaluator.least_seconds(choice), choice) >= limit:
            return  # most are too slow, and seconds are faster to compute than bytes
        score = self.scores.of_layout(choice, self.evaluator.least(choice))
        if score < limit and self.is_wanted(choice):
            heappush(self._heap, (score, self.pushed, choice))

    def execute(self, choice: Choice) -> None:
        cost = self.evaluator.cost(choice)
        found = Found(choice, cost, self.scores.objective(choice, cost))
        self.executed.append(found)
        if found.score < self.best_score:
            self.best = found

    def execute_next(self) -> bool:
        """Execute the most promising layout. Return False if none can be the best."""
        if self.least >= self.best_score:
            return False
        self.execute(heappop(self._heap)[2])
        return True

    def execute_runners_up(self) -> tuple[Found, ...]:
        """Return the best layouts that follow the best one. Execute waiting ones with degrees of
        their own, if there are too few."""
        seen = {each.choice.degrees for each in self.executed}
        while self._heap and len(seen) <= RUNNERS_UP:
            choice = heappop(self._heap)[2]
            if choice.degrees not in seen:
                seen.add(choice.degrees)
                self.execute(choice)
        others = [each for each in self.executed if each is not self.best]
        return tuple(sorted(others, key=lambda each: each.score)[:RUNNERS_UP])
