"""Complete layouts of one search: those that wait, and those whose timeline was executed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf

from holdfast.plan.cost.choice import Choice
from holdfast.plan.cost.evaluate import Evaluator
from holdfast.plan.search.limits import Found
from holdfast.plan.search.scores import Scores

RUNNERS_UP = 8


@dataclass
class Candidates:
    """A heap of layouts by their least scores. is_wanted: False for layouts that are left out.
    ceiling: a score that is known already.
    executed: with their costs, in the order of execution. pushed: layouts that got a bound."""

    evaluator: Evaluator
    scores: Scores
    is_wanted: Callable[[Choice], bool]
    ceiling: float = inf
    best: Found | None = None
    executed: list[Found] = field(default_factory=list)
    pushed: int = 0
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
