"""The search finds what costing every layout finds, and keeps to its limits."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from random import Random

import pytest

from holdfast.config.sections.pipeline_schedules import SCHEDULE_KINDS
from holdfast.core.sharding.pipeline_stages import best_split
from holdfast.errors import LayoutError
from holdfast.plan.cost.choice import Choice, ReplicaChoice
from holdfast.plan.cost.compiled_schedule import compiled
from holdfast.plan.cost.evaluate import Evaluator, Problem, StepCost
from holdfast.plan.cost.pipeline_time import (
    StageTimes,
    in_flight,
    kept_microbatches,
    late_passes,
    least_pipeline_time,
    pipeline_time,
)
from holdfast.plan.hardware.cluster import Cluster, NodePool
from holdfast.plan.hardware.devices import Efficiency, StepCosts, load_devices
from holdfast.plan.hardware.link import Link
from holdfast.plan.search.search import Limits, SearchResult, search
from holdfast.plan.search.shares import with_best_shares
from holdfast.plan.search.splits import balanced_split
from tests.support.marks import in_campaign
from tests.support.plan_brute_force import least_step, small_problem

SEEDS = (*range(8), 144, 176, 280, *map(in_campaign, range(8, 24)))
"""Problems; `benchmarks/runtime/plan_search.py` has 500. Three of them once
failed."""


def _found(problem: Problem, limits: Limits) -> float:
    try:
        return search(problem, limits).best.score
    except LayoutError:
        return inf


@pytest.mark.parametrize("seed", SEEDS)
def test_the_search_is_as_good_as_costing_every_layout(seed: int) -> None:
    problem, limits = small_problem(seed)
    assert _found(problem, limits) == pytest.approx(least_step(problem, limits), rel=1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_it_is_so_with_measured_constants_of_a_step(seed: int) -> None:
    """A constant of a step is paid once, whatever number of blocks a rank has."""
    problem, limits = small_problem(seed)
    fastest = search(small_problem(0)[0]).best.score
    steps = StepCosts(fastest / 50, fastest / 5, 3 * fastest, 1.2, 2.0, 1.0, 3.0)
    devices = {name: replace(each, steps=steps) for name, each in problem.devices.items()}
    problem = replace(problem, devices=devices)
    assert _found(problem, limits) == pytest.approx(least_step(problem, limits), rel=1e-9)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zb-h1", "zbv", "dualpipev"])
def test_no_timeline_is_shorter_than_its_bound(schedule: str) -> None:
    chance = Random(schedule)
    kind = SCHEDULE_KINDS[schedule]
    for _ in range(25):
        pp = chance.randint(2, 5)
        virtual = kind.virtual or (chance.choice((2, 3)) if schedule == "interleaved" else 1)
        microbatches = chance.randint(kind.least_microbatches(pp), 3 * pp)
        stages = [
            StageTimes(*(chance.uniform(1, 2) for _ in range(3)), chance.choice((0, 1)), 0.1, {})
            for _ in range(pp * virtual)
        ]
        asked = schedule, pp, virtual, microbatches
        least = least_pipeline_time(*asked, stages).seconds
        assert least <= pipeline_time(*asked, stages).seconds * (1 + 1e-9)
        assert kept_microbatches(*asked) == in_flight(*asked)
        if kind.splits_backward:
            program = compiled(schedule, pp, microbatches, virtual)
            assert late_passes(*asked) == tuple(number / virtual for number in program.late)


def test_the_slowest_stage_is_as_fast_as_dynamic_programming_finds() -> None:
    chance = Random(1)
    for _ in range(60):
        blocks, stages = chance.randint(4, 14), chance.randint(2, 4)
        times = [chance.uniform(1, 3) for _ in range(blocks)]
        speed = [chance.uniform(1, 2) for _ in range(stages)]

        def cost(
            stage: int,
            start: int,
            stop: int,
            times: list[float] = times,
            speed: list[float] = speed,
        ) -> float:
            return sum(times[start:stop]) * speed[stage] + (stage == len(speed) - 1)

        def most(split: tuple[int, ...], cost=cost) -> float:  # type: ignore[no-untyped-def]
            edges = [sum(split[:n]) for n in range(len(split) + 1)]
            return max(cost(n, edges[n], edges[n + 1]) for n in range(len(split)))

        found = balanced_split(blocks, stages, cost)
        assert sum(found) == blocks
        assert min(found) > 0
        assert most(found) == pytest.approx(most(best_split(blocks, stages, cost, cost)), rel=1e-3)


def _two_kinds() -> Problem:
    problem, _ = small_problem(0)
    link = Link(1e-6, 1e10)
    pools = (
        NodePool("fast", 4, 8, "A100-80", link, link),
        NodePool("slow", 4, 8, "V100-16", link, link),
    )
    # the same shares of unlike peaks, and no ramps: those would hide the peaks in tiny products
    alike = {"bf16": Efficiency(ramp_s=0.0, launch_s=0.0)}
    devices = {name: replace(each, efficiency=alike) for name, each in load_devices().items()}
    return Problem(problem.workload, Cluster(pools), devices)


def test_a_faster_pool_gets_more_microbatches() -> None:
    problem = _two_kinds()
    groups = tuple(ReplicaChoice(2, 1, 1, 1, 1, (), (pool,), 1) for pool in ("fast", "slow"))
    evaluator = Evaluator(problem)
    found = with_best_shares(evaluator, Choice(groups, 1), 40)
    assert found is not None
    assert found.microbatches == 40
    given = {
        name: [g.microbatches for g in found.replicas if g.pools == (name,)]
        for name in ("fast", "slow")
    }
    assert min(given["fast"]) > max(given["slow"])
    cost = evaluator.cost(found)
    for other in range(21, 40):
        moved = Choice(
            tuple(
                ReplicaChoice(1, 1, 1, 1, 1, (), (pool,), each)
                for pool, total in (("fast", other), ("slow", 40 - other))
                for each in (total // 2, total - total // 2)
                if each
            ),
            1,
        )
        if moved.number_of_replicas == 4:
            assert cost.step_s <= evaluator.cost(moved).step_s * (1 + 1e-9)


def _searched(limits: Limits) -> SearchResult:
    problem, _ = small_problem(0)
    return search(problem, limits)


def test_what_is_fixed_stays() -> None:
    found = _searched(Limits(dp_shard=1, microbatch=1, schedules=("gpipe",), recompute=("full",)))
    for each in (found.best, *found.runners_up):
        assert each.choice.microbatch == 1
        assert each.choice.schedule == "gpipe"
        assert {g.dp_shard for g in each.choice.replicas} == {1}
        assert {word for g in each.choice.replicas for word in g.recompute} == {"full"}


def test_layouts_that_rules_refuse_are_left_out() -> None:
    problem, limits = small_problem(0)
    best = search(problem, limits).best.choice
    other = search(problem, limits, allows=lambda choice: choice != best).best.choice
    assert other != best


def test_another_objective_finds_another_layout() -> None:
    """Fewer devices are cheaper where a step is not much longer."""
    problem, limits = small_problem(2)

    def device_seconds(choice: Choice, cost: StepCost) -> float:
        return choice.devices * cost.step_s

    fastest, cheapest = search(problem, limits), search(problem, limits, device_seconds)
    assert cheapest.best.score <= device_seconds(fastest.best.choice, fastest.best.cost)


def test_the_last_layout_is_the_first_bound_of_the_next_search() -> None:
    problem, limits = small_problem(3)
    cold = search(problem, limits)
    warm = search(problem, limits, first=[cold.best.choice])
    assert warm.best.score == cold.best.score
    assert warm.bounded <= cold.bounded
