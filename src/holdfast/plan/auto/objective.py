"""The objective of a run's plan, and the rules of its run file."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial

from holdfast.config.loading.load import LoadedConfig
from holdfast.config.run import RunConfig
from holdfast.config.sections.degrees import find_impossible_degrees
from holdfast.errors import ConfigError
from holdfast.plan.auto.choices import with_choice
from holdfast.plan.auto.plan_cache import Rules
from holdfast.plan.cost.choice import Choice
from holdfast.plan.cost.evaluate import Problem
from holdfast.plan.objective.objectives import Deadline, FinishBy, objective_named
from holdfast.plan.search.limits import Found, Objective, step_seconds


def objective_of(loaded: LoadedConfig, problem: Problem, now: datetime | None) -> Objective:
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
    if config.plan.objective == "time":
        return step_seconds
    return objective_named(config.plan.objective, problem, deadline=deadline)


def end_in_words(loaded: LoadedConfig, problem: Problem, found: Found) -> str:
    """Whether a run with a date is done in time, and for how much; "" for other objectives."""
    objective = objective_of(loaded, problem, None)
    if isinstance(objective, FinishBy):
        return objective.says(found.choice, found.cost)
    return ""


def refusal_of(config: RunConfig, choice: Choice) -> str:
    """The sentence of the rule that refuses a layout; "" if none does."""
    sized = with_choice(config, choice)
    for stage in config.train.batch_warmup:
        if stage.batch_size % choice.microbatch:
            return f"a batch of train.batch_warmup is no multiple of {choice.microbatch} samples"
    length = sized.data.sequence_length
    return find_impossible_degrees(sized.layout, sized.model, sized.train, length, None) or ""


def is_allowed(config: RunConfig, choice: Choice) -> bool:
    """Return True if no rule of the run file refuses a layout."""
    return not refusal_of(config, choice)


def rules_of(loaded: LoadedConfig, problem: Problem, now: datetime | None = None) -> Rules:
    """The objective and the rules of a run's search. now: for an objective with a date. Raises
    ConfigError as `objective_of` does."""
    config = loaded.config
    objective = objective_of(loaded, problem, now)
    return Rules(
        objective,
        partial(is_allowed, config),
        f"{config.plan.objective} {_rules_in_words(config)}",
        config.plan.objective != "finish_by",
    )


def fastest_of(config: RunConfig) -> Rules:
    """The rules of a run's search for the shortest step."""
    return Rules(step_seconds, partial(is_allowed, config), f"time {_rules_in_words(config)}")


def _rules_in_words(config: RunConfig) -> str:
    """All values that `refusal_of` depends on, without the layout."""
    sections = config.layout.model_dump_json(), config.model.model_dump_json()
    train = config.train.model_dump_json(exclude={"steps"})
    return "\n".join((*sections, train, str(config.data.sequence_length)))
