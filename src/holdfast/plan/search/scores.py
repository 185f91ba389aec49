"""Least scores of groups of layouts, by the objective."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from holdfast.plan.cost.choice import Choice, ReplicaChoice
from holdfast.plan.cost.evaluate import Problem, StepCost
from holdfast.plan.search.limits import Objective, step_seconds


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
