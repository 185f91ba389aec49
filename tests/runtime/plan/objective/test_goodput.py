"""Expected goodput: the formulas against a replay of random losses, and against Daly's."""

from __future__ import annotations

from dataclasses import replace
from math import expm1

import pytest
from benchmarks.lab.layout_replay import run_layout

from holdfast.plan.cost.choice import Choice
from holdfast.plan.cost.evaluate import Problem
from holdfast.plan.objective.goodput import GoodputModel
from holdfast.plan.objective.losses import absent_chances, batch_chances
from holdfast.plan.objective.recovery_costs import RecoveryCosts
from holdfast.policy.saving.tiers import DISK
from tests.runtime.plan.objective.problems import layout, pool, problem

SLOW_RETURN = RecoveryCosts(spot_return_s=3_600.0, store_bandwidth=1e8)


def expected_and_replayed(
    given: Problem, choice: Choice, costs: RecoveryCosts, days: float = 12
) -> tuple[float, float]:
    model = GoodputModel(given, costs)
    cost = model.evaluator.cost(choice)
    assert cost.fits
    found = [run_layout(model, choice, cost, days, seed).tokens_per_s for seed in (1, 2)]
    return model.expected(choice, cost).tokens_per_s, sum(found) / 2


@pytest.mark.parametrize("burst", [1.0, 2.0])
@pytest.mark.parametrize("choice", [layout(16, 1, 4), layout(4, 4, 16), layout(1, 8, 64)])
def test_formulas_say_what_a_replay_of_random_losses_shows(choice: Choice, burst: float) -> None:
    given = problem(pool(losses_per_day=4.0, burst=burst))
    expected, replayed = expected_and_replayed(given, choice, SLOW_RETURN)
    assert expected == pytest.approx(replayed, rel=0.03)


def test_a_cluster_that_loses_nothing_has_the_throughput_of_the_step() -> None:
    model = GoodputModel(problem(pool(losses_per_day=0.0, zone="")))
    choice = layout(16, 1, 4)
    found = model.expected(choice, model.evaluator.cost(choice))
    assert found.tokens_per_s == pytest.approx(found.full, rel=1e-4)
    assert found.interruptions_per_day == 0


def test_one_replica_without_peers_loses_what_daly_says() -> None:
    """One node, so nothing but the run store survives, and nodes return at once. For each second of
    work T = M e^(R/M) (e^((tau + delta)/M) - 1) / tau."""
    costs = RecoveryCosts(spot_return_s=1e-6, save_pause_s=5.0, store_bandwidth=1e12)
    model = GoodputModel(problem(pool(nodes=1, losses_per_day=24.0, zone="")), costs)
    choice = layout(1, 2, 64)
    found = model.expected(choice, model.evaluator.cost(choice))
    mtbf, tau = 3_600.0, found.intervals_s[DISK]
    pause = model.pause_s(choice, 2)
    daly = mtbf * (1 + expm1(pause / mtbf)) * expm1((tau + 5.0) / mtbf) / tau
    assert found.full / found.tokens_per_s == pytest.approx(daly, rel=0.01)


def test_more_replicas_lose_less_to_a_burst() -> None:
    model = GoodputModel(problem(pool(burst=2.0)))
    both = (layout(1, 16, 64), layout(8, 2, 8))
    few, many = (model.expected(each, model.evaluator.cost(each)) for each in both)
    assert many.pauses["from_store"] < few.pauses["from_store"]
    assert many.pauses["continues"] > few.pauses["continues"]


def test_a_replica_on_nodes_of_its_own_keeps_the_run_alive() -> None:
    spot, kept = pool("spot", 4, burst=3.0), pool("kept", 2, is_spot=False, losses_per_day=0.004)
    given = problem(spot, replace(kept, zone="b"))
    mixed = replace(
        layout(1, 8, 32),
        replicas=(*layout(1, 8, 40).replicas, *layout(1, 4, 24, ("kept",)).replicas),
    )
    across = layout(1, 8, 64, ("spot",) * 4 + ("kept",) * 4)
    model = GoodputModel(given)
    alive, stops = (model.expected(each, model.evaluator.cost(each)) for each in (mixed, across))
    assert stops.pauses["from_store"] > 1e-3
    assert alive.pauses["from_store"] < stops.pauses["from_store"] / 5


def test_spare_nodes_take_the_place_of_lost_ones() -> None:
    choice = layout(1, 4, 64)
    tight, spare = (
        GoodputModel(problem(pool(nodes=nodes, losses_per_day=1.0))) for nodes in (2, 8)
    )
    without, with_spares = (
        model.expected(choice, model.evaluator.cost(choice)) for model in (tight, spare)
    )
    assert with_spares.fewer < without.fewer / 100


@pytest.mark.parametrize("burst", [1.0, 1.5, 4.0])
def test_absent_nodes_have_the_mean_of_their_rates(burst: float) -> None:
    chances = absent_chances(400, 1e-4, 300.0, burst)
    mean = sum(k * chance for k, chance in enumerate(chances))
    assert sum(chances) == pytest.approx(1)
    assert mean == pytest.approx(400 * 0.03 / 1.03, rel=0.01)
    sizes = batch_chances(burst, 64)
    assert sum(size * chance for size, chance in sizes) == pytest.approx(burst, rel=0.01)
