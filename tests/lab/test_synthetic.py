"""Each generator reproduces the statistic it is there for, and the same seed the same trace."""

from __future__ import annotations

import itertools
from statistics import mean, pstdev

import pytest
from benchmarks.lab.intervals import poisson

from holdfast_lab.traces import synthetic
from holdfast_lab.traces.events import check_events
from holdfast_lab.traces.generators import GENERATORS, Fit, fit_trace, make_trace
from holdfast_lab.traces.node_changes import Trace
from holdfast_lab.traces.summary import churn_of, levels_of


def _drops(trace: Trace) -> list[int]:
    return [len(gone) for _, gone, _ in trace.instants() if gone]


def test_a_spot_pool_loses_two_nodes_a_burst_and_its_rate_swings() -> None:
    trace = synthetic.spot_pool(3, days=8)
    assert 1.8 < mean(_drops(trace)) < 2.5
    quarter = 6 * 3600
    per = [0] * int(trace.seconds // quarter + 1)
    for at, gone, _ in trace.instants():
        per[int(at // quarter)] += bool(gone)
    busy, quiet = sum(per[0::2]), sum(per[1::2])
    assert 3 < busy / quiet < 8


def test_a_gang_is_mostly_there_in_whole_or_not_at_all() -> None:
    drops = _drops(synthetic.gang_offers(3, days=40))
    assert 0.3 < sum(d == 16 for d in drops) / len(drops) < 0.55


def test_bathtub_lives_end_early_or_at_the_wall() -> None:
    born: dict[str, float] = {}
    lives = []
    for change in synthetic.bathtub_lives(3, nodes=64, days=20).changes:
        if change.kind == "join":
            born[change.node] = change.seconds
        else:
            lives.append((change.seconds - born[change.node]) / 3600)
    assert 0.25 < sum(life < 3 for life in lives) / len(lives) < 0.45
    assert 0.4 < sum(life > 23.9 for life in lives) / len(lives) < 0.65
    assert max(lives) <= 24.1


def test_failures_of_a_cluster_cluster_in_time_and_on_few_nodes() -> None:
    trace = synthetic.cluster_failures(3)
    at = [change.seconds for change in trace.changes if change.kind == "go"]
    gaps = [b - a for a, b in itertools.pairwise(at)]
    assert pstdev(gaps) / mean(gaps) > 1.25
    assert 0.8 < len(at) / 512 / 1.2 < 1.25
    counts: dict[str, int] = {}
    for change in trace.changes:
        if change.kind == "go":
            counts[change.node] = counts.get(change.node, 0) + 1
    assert max(counts.values()) > 8 * mean(counts.values())


def test_poisson_failures_have_a_spread_of_one() -> None:
    trace = poisson(3, mtbf=100.0, failures=4000)
    at = [change.seconds for change in trace.changes if change.kind == "go"]
    gaps = [b - a for a, b in itertools.pairwise(at)]
    assert mean(gaps) == pytest.approx(100, rel=0.06)
    assert pstdev(gaps) / mean(gaps) == pytest.approx(1, rel=0.08)


# --- what each generator by name reproduces -------------------------------------------------------
def refit(name: str, days: float, **given: float) -> Fit:
    [fit] = fit_trace(make_trace(name, 3, days, given))
    assert fit.generator == name
    return fit


@pytest.mark.parametrize("name", sorted(GENERATORS))
def test_the_same_seed_gives_the_same_events(name: str) -> None:
    days = 90.0 if name == "prices" else 2.0
    one, again, other = (make_trace(name, seed, days, {}) for seed in (1, 1, 2))
    assert one == again
    assert one.events != other.events
    check_events(one.events, ["t"] * len(one.events))
    assert one.seconds >= 86400


def test_a_spot_pool_has_the_bursts_and_the_swing_that_were_asked_for() -> None:
    shares = {f"size_{k}": 0.0 for k in range(1, 7)} | {"size_1": 0.5, "size_4": 0.5}
    found = refit("spot", 12, nodes=32, between_s=1500, swing=4, **shares).parameters
    assert found["nodes"] == 32
    assert found["between_s"] == pytest.approx(1500, rel=0.15)
    assert found["swing"] == pytest.approx(4, rel=0.35)
    assert found["size_4"] == pytest.approx(0.5, abs=0.1)


def test_gangs_have_the_runs_that_were_asked_for() -> None:
    found = refit("gang", 60, nodes=8, up_s=4000, down_s=9000).parameters
    assert found["up_s"] == pytest.approx(4000, rel=0.25)
    assert found["down_s"] == pytest.approx(9000, rel=0.25)


def test_lives_end_at_the_wall() -> None:
    found = refit("lives", 10, nodes=16, wall_h=12).parameters
    assert found["wall_h"] == pytest.approx(12, rel=0.01)


def test_failures_have_their_rate_and_their_lemons() -> None:
    made = make_trace("failures", 3, 700.0, {"nodes": 256, "per_node_year": 3, "repeat": 0.2})
    [found] = fit_trace(made)
    assert found.parameters["per_node_year"] == pytest.approx(3, rel=0.2)
    assert found.parameters["repeat"] == pytest.approx(0.2, abs=0.08)
    worst = max(churn_of(made).by_node.values())
    assert worst > 5 * churn_of(made).lost / 256


def test_prices_step_by_the_month_and_stay_below_the_fixed_price() -> None:
    found = refit("prices", 8000, mean=9, on_demand=30, between_days=20, step=0.2).parameters
    assert found["mean"] == pytest.approx(9, rel=0.15)
    assert found["between_days"] == pytest.approx(20, rel=0.15)
    assert found["step"] == pytest.approx(0.2, rel=0.25)
    [level] = levels_of(make_trace("prices", 1, 3000.0, {"mean": 20, "on_demand": 25}), "price")
    assert level.most <= 25


def test_carbon_swings_daily() -> None:
    found = refit("carbon", 120, mean=300, swing=0.4, noise=0.1).parameters
    assert found["mean"] == pytest.approx(300, rel=0.05)
    assert found["swing"] == pytest.approx(0.4, rel=0.2)
    assert found["noise"] == pytest.approx(0.1, rel=0.25)
