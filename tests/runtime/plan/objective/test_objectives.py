"""Objectives by name: units, what is refused, and which layout each prefers."""

from __future__ import annotations

from dataclasses import replace
from math import expm1
from typing import Any

import pytest
from benchmarks.lab.layout_replay import run_layout
from benchmarks.lab.plan_failures import EXAMPLE, problem_of

from holdfast.config.loading.load import load_config
from holdfast.errors import ConfigError
from holdfast.plan.cost.choice import Choice, ReplicaChoice
from holdfast.plan.cost.evaluate import Evaluator, Problem
from holdfast.plan.cost.run_workload import workload_of
from holdfast.plan.hardware.cluster import Cluster, NodePool
from holdfast.plan.hardware.devices import load_devices
from holdfast.plan.hardware.link import Link
from holdfast.plan.objective.energy import JOULES_PER_KWH, step_joules
from holdfast.plan.objective.goodput import GoodputModel
from holdfast.plan.objective.losses import absent_chances, batch_chances
from holdfast.plan.objective.next_plans import NextPlan, next_plans
from holdfast.plan.objective.objectives import OBJECTIVES, Deadline, FinishBy, objective_named
from holdfast.plan.objective.recoveries import recovery_of
from holdfast.plan.objective.recovery_costs import RecoveryCosts
from holdfast.plan.search.search import Found, Limits, search
from holdfast.policy.saving.tiers import DISK


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
    given = problem(pool(), pool("other", usd_per_hour=None))
    with pytest.raises(ConfigError, match=r"pools\.other\.usd_per_hour.*does not have for other"):
        objective_named(name, given, deadline=Deadline(10, 1.0))


@pytest.mark.parametrize("name", ["tokens_per_usd", "goodput_per_usd", "finish_by"])
def test_0_is_a_price_and_of_free_layouts_the_fastest_is_the_best(name: str) -> None:
    given = problem(pool(usd_per_hour=0.0), pool("paid", usd_per_hour=7.5))
    score, evaluator = objective_named(name, given, deadline=Deadline(10, 99.0)), Evaluator(given)
    slow, fast = (layout(2, 1, 32), layout(16, 1, 4))
    found = [score(each, evaluator.cost(each)) for each in (fast, slow)]
    assert 0 < found[0] < found[1] < 1e-3


def test_a_pool_without_carbon_is_named_and_refused() -> None:
    with pytest.raises(ConfigError, match=r"grams_co2_per_kwh.*does not have for spot"):
        objective_named("tokens_per_kg_co2", problem(pool(grams_co2_per_kwh=None)))


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


# --- small problems with round numbers ------------------------------------------------------------
BLOCKS = 24


def pool(name: str = "spot", nodes: int = 8, **settings: Any) -> NodePool:
    """Nodes of two A100 that lose a node often."""
    usual: dict[str, Any] = {
        "zone": "a",
        "is_spot": True,
        "usd_per_hour": 2.0,
        "losses_per_day": 9.2,
        "grams_co2_per_kwh": 400.0,
    }
    return NodePool(
        name, nodes, 2, "A100-80", Link(5e-6, 240e9), Link(20e-6, 12.5e9 / 2), **usual | settings
    )


def problem(*pools: NodePool, batch: int = 64) -> Problem:
    config = load_config(
        None,
        ["model.preset=350m", "data.sequence_length=1024", "train.precision=bf16", "device=cuda"],
    ).config
    workload = replace(workload_of(config), batch=batch)
    return Problem(workload, Cluster(pools or (pool(),)), load_devices())


def layout(count: int, pp: int, microbatches: int, pools: tuple[str, ...] = ("spot",)) -> Choice:
    """Replicas of `pp` stages of one device, with microbatches of one sample."""
    stages = tuple(BLOCKS // pp for _ in range(pp)) if pp > 1 else ()
    group = ReplicaChoice(count, pp, 1, 1, 1, stages, pools, microbatches)
    return Choice((group,), 1)


# --- the example in which the best layout without failures is not the best with them --------------
MICROBATCHES = (8, 64)
"""Those of the two best layouts; `benchmarks.lab.plan_failures` searches all."""


@pytest.mark.slow
def test_the_best_layout_with_failures_is_another_one_and_wins_in_a_replay() -> None:
    problem = problem_of(EXAMPLE / "run.yaml", str(EXAMPLE / "cluster.yaml"))
    model = GoodputModel(problem)

    def best_by(name: str) -> Found:
        found = (
            search(
                problem,
                Limits(
                    cp=1,
                    tp=1,
                    zero=(3,),
                    schedules=("1f1b",),
                    recompute=("none", "full"),
                    microbatch=microbatch,
                ),
                objective_named(name, problem),
            ).best
            for microbatch in MICROBATCHES
        )
        return min(found, key=lambda each: each.score)

    by_time, by_goodput = best_by("time"), best_by("goodput")
    assert by_time.choice != by_goodput.choice
    assert by_time.cost.step_s < by_goodput.cost.step_s
    one, other = (
        run_layout(model, best.choice, best.cost, days=40).tokens_per_s
        for best in (by_time, by_goodput)
    )
    assert other > 1.02 * one


# --- expected goodput -----------------------------------------------------------------------------
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


# --- the next plans -------------------------------------------------------------------------------
def plans_of(choice: Choice, **settings: object) -> tuple[NextPlan, ...]:
    model = GoodputModel(problem(pool(**settings)))
    return next_plans(model, choice, model.evaluator.cost(choice))


def test_each_likely_loss_has_a_plan() -> None:
    model = GoodputModel(problem(pool(nodes_per_rack=2, nodes_per_power_domain=4), batch=512))
    choice = layout(4, 4, 128)
    found = next_plans(model, choice, model.evaluator.cost(choice))
    assert [(plan.loss, plan.lost, plan.rung) for plan in found] == [
        ("node", {"spot": 1}, 0),
        ("rack", {"spot": 2}, 0),
        ("power", {"spot": 4}, 0),
        ("half of the spot pool", {"spot": 4}, 0),
        ("zone", {"spot": 8}, 6),
    ]
    node, _, _, half, zone = found
    assert node.layout is not None
    assert node.layout.devices <= 14
    assert 0.45 < half.share < 0.7
    assert half.share < node.share < 1
    assert zone.layout is None
    assert zone.tokens_per_s == 0


def test_one_replica_over_all_nodes_takes_its_state_from_memory() -> None:
    node, half, _ = plans_of(layout(1, 16, 64))
    assert (node.rung, half.rung) == (4, 6)
    assert node.layout is not None
    assert node.moved_bytes > 0


def moved_bytes(old: Choice, new: Choice, lost: int) -> float:
    names = [f"spot/{number}" for number in range(8)]
    return recovery_of(problem(), old, new, {"spot": names}, names[:lost])[1]


def test_fewer_of_the_same_replicas_move_nothing_that_they_hold() -> None:
    old, new = layout(4, 4, 16), layout(2, 4, 32)
    assert moved_bytes(old, new, 4) == 0
    assert moved_bytes(old, old, 0) == 0


@pytest.mark.parametrize(("new", "copies"), [(layout(2, 1, 32), 2), (layout(1, 1, 64), 1)])
def test_what_devices_lack_is_moved(new: Choice, copies: int) -> None:
    """Each device has one of 16 stages, and shall have the complete model."""
    given = problem()
    state = given.workload.parameters * given.workload.state.optimizer
    moved = moved_bytes(layout(1, 16, 64), new, 1)
    assert 0.85 * copies * state < moved < copies * state


def test_a_search_of_the_rest_replaces_the_simple_choice() -> None:
    model = GoodputModel(problem())
    choice = layout(1, 16, 64)

    def rest(given: object) -> Choice:
        return search(given, Limits(cp=1, tp=1, dp_shard=1, microbatch=1)).best.choice  # type: ignore[arg-type]

    cost = model.evaluator.cost(choice)
    simple, searched = next_plans(model, choice, cost), next_plans(model, choice, cost, rest)
    for one, other in zip(simple, searched, strict=True):
        assert other.tokens_per_s >= one.tokens_per_s
