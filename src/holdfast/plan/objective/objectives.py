"""The objectives of a plan by name (`plan.objective`). The search makes each as small as it can.

time                 seconds of a step
tokens_per_usd       dollars of 1e9 tokens, no failure counted
tokens_per_kwh       kWh of 1e9 tokens, of the devices
tokens_per_kg_co2    kg of CO2 of 1e9 tokens, of the devices
goodput              expected seconds of a step, with failures
goodput_per_usd      dollars of 1e9 tokens, with failures
finish_by            dollars of the run, if it is expected to be done in time
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from holdfast.errors import ConfigError, unknown_name
from holdfast.plan.cost.choice import Choice
from holdfast.plan.cost.evaluate import Problem, StepCost
from holdfast.plan.objective.energy import (
    JOULES_PER_KWH,
    co2_kg_per_step,
    idle_watts,
    kwh_per_step,
    refuse_without,
    usd_per_hour,
)
from holdfast.plan.objective.goodput import GoodputModel
from holdfast.plan.objective.recovery_costs import RecoveryCosts

_EXPECTED = ("goodput", "goodput_per_usd", "finish_by")
OBJECTIVES = ("time", "tokens_per_usd", "tokens_per_kwh", "tokens_per_kg_co2", *_EXPECTED)
FREE = 1e-9
"""The price of an hour, or the grams of a second, of a layout that costs nothing. Of several such
layouts the fastest is the best."""
TOKENS = 1e9
"""Prices and energy are of so many tokens."""
LATE = 1e15
"""Added to the score of a layout that is late. Of late layouts the earliest is the best."""


class Score(Protocol):
    """A score of layouts. The search drops layouts by the least score that they can have."""

    def __call__(self, choice: Choice, cost: StepCost, /) -> float: ...
    def least(self, choice: Choice, step_s: float) -> float: ...


@dataclass(frozen=True)
class Deadline:
    """When a run must be done."""

    steps: int  # of the run
    hours: float  # from now


def objective_named(
    name: str,
    problem: Problem,
    *,
    costs: RecoveryCosts | None = None,
    deadline: Deadline | None = None,
) -> Score:
    """Raises ConfigError for an unknown name, or for what the cluster does not say."""
    cluster = problem.cluster
    if name not in OBJECTIVES:
        raise unknown_name(ConfigError, "objective", name, OBJECTIVES, "plan.objective")
    if name in ("tokens_per_usd", "goodput_per_usd", "finish_by"):
        refuse_without("usd_per_hour", cluster, name)
    if name == "tokens_per_kg_co2":
        refuse_without("grams_co2_per_kwh", cluster, name)
    if name == "finish_by" and deadline is None:
        raise ConfigError(
            "the objective finish_by needs a date",
            where="plan.finish_by",
            remedy="give the hours in which the run must be done",
        )
    if name in _EXPECTED:
        model = GoodputModel(problem, costs or RecoveryCosts())
        if name == "finish_by" and deadline is not None:
            return FinishBy(model, deadline)
        return Goodput(model, is_per_usd=name == "goodput_per_usd")
    return Simple(name, problem)


@dataclass(frozen=True)
class Simple:
    """Scores layouts by time, money, energy or carbon, without failures."""

    name: str
    problem: Problem

    def __call__(self, choice: Choice, cost: StepCost) -> float:
        tokens = self.problem.workload.step_tokens / TOKENS
        if self.name == "tokens_per_kwh":
            return kwh_per_step(self.problem, choice, cost) / tokens
        if self.name == "tokens_per_kg_co2":
            return (co2_kg_per_step(self.problem, choice, cost) or FREE * cost.step_s) / tokens
        return self.least(choice, cost.step_s)

    def least(self, choice: Choice, step_s: float) -> float:
        """The least score of these replicas if a step takes at least so long. Devices take at least
        their idle power."""
        problem = self.problem
        tokens = problem.workload.step_tokens / TOKENS
        if self.name == "time":
            return step_s
        if self.name == "tokens_per_usd":
            return (usd_per_hour(problem.cluster, choice) or FREE) * step_s / 3600 / tokens
        watts = idle_watts(problem, choice)
        if self.name == "tokens_per_kwh":
            return sum(watts.values()) * step_s / JOULES_PER_KWH / tokens
        grams = sum(
            w * (problem.cluster.pool(name).grams_co2_per_kwh or 0.0) for name, w in watts.items()
        )
        return (grams / 1e3 / JOULES_PER_KWH or FREE) * step_s / tokens


@dataclass
class Goodput:
    """Scores layouts by expected goodput."""

    model: GoodputModel
    is_per_usd: bool = False
    _fastest: float = 0.0

    def __call__(self, choice: Choice, cost: StepCost) -> float:
        if not cost.fits:
            return float("inf")
        self._fastest = max(self._fastest, self.model.problem.workload.step_tokens / cost.step_s)
        return self._score(choice, self.model.expected(choice, cost).tokens_per_s)

    def least(self, choice: Choice, step_s: float) -> float:
        """The least score of these replicas if a step takes at least so long."""
        fastest = max(self._fastest, self.model.problem.workload.step_tokens / step_s)
        return self._score(choice, self.model.at_most(choice, step_s, fastest))

    def _score(self, choice: Choice, tokens_per_s: float) -> float:
        if tokens_per_s <= 0:
            return float("inf")
        problem = self.model.problem
        if not self.is_per_usd:
            return problem.workload.step_tokens / tokens_per_s
        present = self.model.present_of(choice)
        usd = usd_per_hour(problem.cluster, choice, present)
        return (usd or FREE) / 3600 / tokens_per_s * TOKENS


@dataclass
class FinishBy:
    """Dollars of a run that is expected to be done in time, with failures. A late one has `LATE`
    added to its seconds, so the search returns the earliest if none is in time."""

    model: GoodputModel
    deadline: Deadline

    def __call__(self, choice: Choice, cost: StepCost) -> float:
        if not cost.fits:
            return float("inf")
        seconds, usd = self.forecast(choice, cost)
        usd = usd or FREE * seconds
        return usd if seconds <= self.deadline.hours * 3600 else LATE + seconds

    def least(self, choice: Choice, step_s: float) -> float:
        """The least score of these replicas if a step takes at least so long, and nothing fails."""
        seconds = self.deadline.steps * step_s
        if seconds > self.deadline.hours * 3600:
            return LATE + seconds
        present = self.model.present_of(choice)
        usd = usd_per_hour(self.model.problem.cluster, choice, present)
        return seconds / 3600 * usd or FREE * seconds

    def forecast(self, choice: Choice, cost: StepCost) -> tuple[float, float]:
        """(seconds, dollars) of the run, expected."""
        problem = self.model.problem
        expected = self.model.expected(choice, cost)
        if expected.tokens_per_s <= 0:
            return float("inf"), float("inf")
        seconds = self.deadline.steps * problem.workload.step_tokens / expected.tokens_per_s
        return seconds, seconds / 3600 * usd_per_hour(problem.cluster, choice, expected.present)

    def says(self, choice: Choice, cost: StepCost) -> str:
        """One sentence: in time and for how much, or how late the earliest is."""
        seconds, usd = self.forecast(choice, cost)
        hours = seconds / 3600
        given, dollars = f"{self.deadline.hours:.4g}", f"${usd:,.0f}"
        if hours <= self.deadline.hours:
            return f"done after {hours:.1f} h, expected, of {given}, for {dollars}"
        late = f"no layout is done in {given} h: the earliest takes {hours:.1f} h, expected"
        return f"{late}, and {dollars}"
