"""Node-hours and dollars from a journal, and what a budget says of them."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.config.sections.budget import BudgetConfig
from holdfast.events import NodesPresent, RunStarted
from holdfast.policy.budget import budget_use, effective_limits
from holdfast.policy.spending import SpendMeter, Spent, meter_of
from tests.support.journal_builder import Scribe

A: dict[str, Any] = {"pool": "kept", "usd_per_hour": 36.0}
B: dict[str, Any] = {"pool": "spot", "market": "spot", "usd_per_hour": 7.2}


def present(run: Scribe, after: float = 0.0, **nodes: dict[str, Any]) -> None:
    run.write(NodesPresent(nodes), after)


def test_each_node_counts_while_it_is_there() -> None:
    run = Scribe()
    run.open_generation()
    run.write(RunStarted("demo", "", "", tags={"team": "a"}))
    present(run, 10, a=A)  # the first word: a was there from the start
    present(run, 90, a=A, b=B)
    present(run, 100, a=A)
    run.stop(after=100)
    run.at += 1000  # of no node
    run.open_generation()
    run.write(RunStarted("demo", "", "", True, tags={"team": "b"}))
    present(run, 0, c={})
    run.finish(after=50)
    meter = meter_of(run.records)
    stays = [(s.node, round(s.end - s.begin), s.tags["team"]) for s in meter.stays]
    assert stays == [("b", 100, "a"), ("a", 300, "a"), ("c", 50, "b")]
    spent = meter.spent()
    assert spent.node_hours == pytest.approx(450 / 3600)
    assert spent.usd == pytest.approx(300 * 0.01 + 100 * 0.002)
    assert spent.unpriced_hours == pytest.approx(50 / 3600)
    assert meter.spent(run.at + 999) == spent, "nothing is open"


def test_a_session_without_an_end_counts_to_its_last_record_and_a_live_one_to_now() -> None:
    run = Scribe()
    run.open_generation()
    run.write(RunStarted("demo", "", ""))
    present(run, 0, a=A)
    run.steps(1, 10)
    meter = meter_of(run.records)
    assert meter.spent().usd == pytest.approx(0.1)
    assert meter.spent(run.at + 10).usd == pytest.approx(0.2)
    assert meter.rate == Spent(1.0, 36.0)
    run.at += 500
    run.open_generation()
    run.write(RunStarted("demo", "", "", True))
    assert meter_of(run.records).spent().usd == pytest.approx(0.1)


def test_a_new_price_ends_the_stay_at_the_old_one() -> None:
    meter, run = SpendMeter(), Scribe()
    run.open_generation()
    run.write(RunStarted("demo", "", ""))
    present(run, 0, a=A)
    present(run, 100, a={**A, "usd_per_hour": 72.0})
    run.finish(after=100)
    for record in run.records:
        meter.observe(record)
    assert [stay.usd for stay in meter.stays] == pytest.approx([1.0, 2.0])


def test_the_nearest_limit_counts_with_what_a_stop_still_costs() -> None:
    budget = BudgetConfig(max_cost=10, max_node_hours=100)
    limits = effective_limits(budget, {"max_cost": 12, "max_node_hours": 50})
    assert limits == {"max_cost": 12, "max_node_hours": 100}
    rate = Spent(4, 36)
    use = budget_use(Spent(90, 11), rate, 60, limits)
    assert use is not None
    assert (use.limit, use.is_over) == ("max_cost", False)
    use = budget_use(Spent(90, 11), rate, 101, limits)
    assert use is not None
    assert use.is_over
    assert budget_use(Spent(90, 11), rate, 60, {}) is None
