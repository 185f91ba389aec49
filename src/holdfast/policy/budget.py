"""What a budget says of a run that has used up so much. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.config.sections.budget import BudgetConfig
from holdfast.policy.spending import HOUR_S, Spent

LIMITS = {"max_cost": "usd", "max_node_hours": "node_hours"}
"""Key of the section `budget` -> what it limits of `Spent`."""
STEPS_AHEAD = 2
"""Steps that are computed after a decision to stop. One is under way when a step is reported, and
the vote of the next one carries the wish."""


@dataclass(frozen=True)
class BudgetUse:
    """How much of the limit that is nearest is used. ahead: with what a stop would still cost."""

    limit: str  # of LIMITS
    used: float
    ahead: float
    most: float

    @property
    def share(self) -> float:
        return self.used / self.most

    @property
    def is_over(self) -> bool:
        """Whether a run that stops only after the next step would pass the limit."""
        return self.ahead > self.most


def budget_use(
    spent: Spent, rate: Spent, stop_s: float, limits: Mapping[str, float]
) -> BudgetUse | None:
    """Return the use of the limit that is nearest; None without limits.

    spent: up to now. rate: of an hour from now on. stop_s: seconds that a stop takes from now on.
    """
    uses = [
        BudgetUse(
            name,
            used := float(getattr(spent, what)),
            used + getattr(rate, what) * stop_s / HOUR_S,
            limits[name],
        )
        for name, what in LIMITS.items()
        if name in limits
    ]
    return max(uses, key=lambda use: use.ahead / use.most, default=None)


def effective_limits(budget: BudgetConfig, raises: Mapping[str, float]) -> dict[str, float]:
    """Return the limits of a run: the run file's, or a larger one that it was given later."""
    given = {name: getattr(budget, name) for name in LIMITS}
    return {
        name: max(most, raises.get(name, 0.0)) for name, most in given.items() if most is not None
    }


def amount(limit: str, value: float) -> str:
    """Return a value of a limit, for people."""
    return f"${value:,.2f}" if limit == "max_cost" else f"{value:,.4g} node-hours"


def why_over_budget(use: BudgetUse) -> str:
    """Return why a run stops."""
    return (
        f"budget.{use.limit}: {amount(use.limit, use.used)} of {amount(use.limit, use.most)} are "
        "used, and one more step would pass it"
    )
