"""Objectives by name: units, what is refused, and which layout each prefers."""

from __future__ import annotations

import pytest

from holdfast.errors import ConfigError
from holdfast.plan.cost.evaluate import Evaluator
from holdfast.plan.objective.energy import JOULES_PER_KWH, step_joules
from holdfast.plan.objective.objectives import OBJECTIVES, Deadline, FinishBy, objective_named
from tests.runtime.plan.objective.problems import layout, pool, problem


def test_units() -> None:
    given, choice = problem(), layout(16, 1, 4)
    cost = Evaluator(given).cost(choice)
    tokens = given.workload.step_tokens / 1e9
    per_usd = objective_named("tokens_per_usd", given)(choice, cost)
    assert per_usd == pytest.approx(8 * 2.0 * cost.step_s / 3600 / tokens)
    joules = sum(step_joules(given, choice, cost).values())
    assert 16 * 60 * cost.step_s < joules < 16 * 400 * cost.step_s
    kwh = objective_named("tokens_per_kwh", given)(choice, cost)
    assert kwh == pytest.approx(joules / JOULES_PER_KWH / tokens)
    assert objective_named("tokens_per_kg_co2", given)(choice, cost) == pytest.approx(0.4 * kwh)


def test_a_device_that_waits_takes_less_power() -> None:
    given = problem()
    busy, waiting = (Evaluator(given).cost(each) for each in (layout(16, 1, 4), layout(1, 16, 16)))
    watts = [
        sum(step_joules(given, choice, cost).values()) / cost.step_s / 16
        for choice, cost in ((layout(16, 1, 4), busy), (layout(1, 16, 16), waiting))
    ]
    assert watts[1] < watts[0] <= 400


@pytest.mark.parametrize("name", ["tokens_per_usd", "goodput_per_usd", "finish_by"])
def test_a_pool_without_a_price_is_named_and_refused(name: str) -> None:
    given = problem(pool(), pool("other", usd_per_hour=0.0))
    with pytest.raises(ConfigError, match=r"pools\.other\.usd_per_hour.*does not have for other"):
        objective_named(name, given, deadline=Deadline(10, 1.0))


def test_a_pool_without_carbon_is_named_and_refused() -> None:
    with pytest.raises(ConfigError, match=r"grams_co2_per_kwh.*does not have for spot"):
        objective_named("tokens_per_kg_co2", problem(pool(grams_co2_per_kwh=0.0)))


def test_unknown_objectives_and_missing_dates_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"no objective 'speed'; use one of time, "):
        objective_named("speed", problem())
    with pytest.raises(ConfigError, match="finish_by needs a date"):
        objective_named("finish_by", problem())


@pytest.mark.parametrize("name", OBJECTIVES)
def test_each_objective_scores_a_layout(name: str) -> None:
    given, choice = problem(), layout(16, 1, 4)
    score = objective_named(name, given, deadline=Deadline(1000, 24.0))
    cost = Evaluator(given).cost(choice)
    assert 0 < score(choice, cost) < 1e6
    assert score.least(choice, cost.step_s) <= score(choice, cost) * (1 + 1e-9)


def test_the_cheapest_in_time_or_the_earliest() -> None:
    given = problem()
    evaluator = Evaluator(given)
    fast, small = layout(16, 1, 4), layout(2, 1, 32)
    scores: dict[float, list[float]] = {}
    for hours in (1e-3, 1e6):
        score = objective_named("finish_by", given, deadline=Deadline(10_000, hours))
        scores[hours] = [score(each, evaluator.cost(each)) for each in (fast, small)]
    assert scores[1e-3][0] < scores[1e-3][1]  # late both: the earlier
    assert scores[1e6][1] < scores[1e6][0]  # in time both: the cheaper
    score = objective_named("finish_by", given, deadline=Deadline(10_000, 1e-3))
    assert isinstance(score, FinishBy)
    assert score.says(fast, evaluator.cost(fast)).startswith("no layout is done in 0.001 h")
