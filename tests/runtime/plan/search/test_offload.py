"""The optimizer's state on the host: what it costs, what it leaves room for, when it is chosen."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from holdfast.errors import LayoutError
from holdfast.plan.cost.choice import Choice, ReplicaChoice
from holdfast.plan.cost.evaluate import Evaluator, Problem
from holdfast.plan.search.limits import Limits
from holdfast.plan.search.search import search
from tests.support.marks import in_campaign
from tests.support.plan_brute_force import least_step, small_problem

MOVED = frozenset({"optimizer"})
BOTH = (frozenset[str](), MOVED)


def with_host(problem: Problem, bytes_s: float = 5e9) -> Problem:
    devices = {name: replace(each, host_bytes_s=bytes_s) for name, each in problem.devices.items()}
    return replace(problem, devices=devices)


def found(problem: Problem, limits: Limits) -> tuple[float, Choice | None]:
    try:
        best = search(problem, limits).best
    except LayoutError:
        return inf, None
    return best.score, best.choice


@pytest.mark.parametrize("seeds", [range(6), in_campaign(range(6, 14))])
def test_the_search_is_as_good_as_costing_every_layout_with_both_places(seeds: range) -> None:
    moved = 0
    for seed in seeds:
        problem, limits = small_problem(seed)
        problem, limits = with_host(problem), replace(limits, offloads=BOTH)
        score, choice = found(problem, limits)
        assert score == pytest.approx(least_step(problem, limits), rel=1e-9)
        moved += choice is not None and choice.host == MOVED
    assert 0 < moved < len(seeds)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_the_update_waits_for_the_bytes_that_move(zero: int) -> None:
    problem = with_host(small_problem(0)[0])
    pool = problem.cluster.pools[0].name
    group = ReplicaChoice(1, 1, 2, 1, 1, (), (pool,), 2)
    kept = Choice((group,), 2, zero=zero)
    moved, evaluator = replace(kept, host=MOVED), Evaluator(problem)
    one, other = evaluator.cost(kept), evaluator.cost(moved)
    parameters = sum(layer.parameters for layer in problem.workload.layers) / 2
    bytes_ = parameters * (12 if zero == 1 else 8)  # with shards the fp32 parameters stay
    assert other.step_s - one.step_s == pytest.approx(2 * bytes_ / 5e9)
    assert other.parts["update"] - one.parts["update"] == pytest.approx(2 * bytes_ / 5e9)
    assert one.peak_bytes - other.peak_bytes == pytest.approx(bytes_)


def test_state_moves_where_nothing_else_fits() -> None:
    problem, limits = small_problem(4)
    pool = replace(problem.cluster.pools[0], nodes=8, devices=4)  # too many for a complete search
    cluster = replace(problem.cluster, pools=(pool,))
    state = 18.0 * sum(layer.parameters for layer in problem.workload.layers)
    device = replace(problem.devices[pool.device], memory_bytes=0.55 * state, host_bytes_s=5e9)
    problem = replace(problem, cluster=cluster, devices={pool.device: device})
    limits = Limits(pp=1, dp_shard=1, tp=1, cp=1, microbatch=1, recompute=("full",))
    assert found(problem, limits) == (inf, None)
    _, choice = found(problem, replace(limits, offloads=BOTH))
    assert choice is not None
    assert choice.host == MOVED
