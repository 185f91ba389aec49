"""The objective of a run's plan, within the rules of its run file."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from math import inf

from holdfast.config.degrees import find_impossible_degrees
from holdfast.config.load import LoadedConfig
from holdfast.config.run import RunConfig
from holdfast.errors import ConfigError
from holdfast.plan.auto.choices import with_choice
from holdfast.plan.cost.choice import Choice
from holdfast.plan.cost.evaluate import Problem, StepCost
from holdfast.plan.objective.objectives import Deadline, Score, objective_named


@dataclass(frozen=True)
class WithinRules:
    """An objective with an infinite score for layouts that rules of the run file refuse."""

    config: RunConfig
    score: Score

    def __call__(self, choice: Choice, cost: StepCost) -> float:
        return inf if refusal_of(self.config, choice) else self.score(choice, cost)

    def least(self, choice: Choice, step_s: float) -> float:
        return self.score.least(choice, step_s)


def objective_of(loaded: LoadedConfig, problem: Problem, now: datetime | None) -> WithinRules:
    """The objective that `plan.objective` names. now: for one with a date.

    Raises ConfigError for what the cluster does not say, and for a date that has passed."""
    config, deadline = loaded.config, None
    if config.plan.objective == "finish_by":
        end = datetime.fromisoformat(config.plan.finish_by).astimezone()
        hours = (end - (now or datetime.now(UTC))).total_seconds() / 3600
        if hours <= 0:
            raise ConfigError(
                f"plan.finish_by {config.plan.finish_by} has passed",
                where=loaded.where("plan.finish_by"),
                remedy="use a later date, or plan.objective=time",
            )
        deadline = Deadline(config.train.steps, hours)
    return WithinRules(config, objective_named(config.plan.objective, problem, deadline=deadline))


def refusal_of(config: RunConfig, choice: Choice) -> str:
    """The sentence of the rule that refuses a layout; "" if none does."""
    sized = with_choice(config, choice)
    length = sized.data.sequence_length
    return find_impossible_degrees(sized.layout, sized.model, sized.train, length, None) or ""
