"""The search gives attention and feed-forward degrees of their own, and finds the best of all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.plan.cost.evaluate import Problem
from holdfast.plan.cost.workload import Attention, Layer, Product
from holdfast.plan.hardware.cluster import Cluster, NodePool
from holdfast.plan.hardware.link import Link
from holdfast.plan.search.search import Limits, search
from tests.support.plan_brute_force import least_step, small_problem


def unlike_parts(seed: int, heads: int) -> Problem:
    """Few heads next to a wide feed-forward, whose weights fit on no device alone."""
    problem, _ = small_problem(seed)
    width, inner = 256, 256 * 12
    block = Layer(
        "block",
        width,
        (
            Product(width, 3 * width, "columns"),
            Product(width, width, "rows"),
            Product(width, inner, "columns"),
            Product(inner, width, "rows"),
        ),
        Attention(heads, heads, width // heads),
        whole_parameters=2 * width,
        cut_moved=4.0 * width + 3 * inner,
        kernels=4,
        reductions=2,
        whole_kept=4.0 * width,
        cut_kept=4.0 * width + 2 * inner,
        mixer=2,
    )
    ends = problem.workload.layers
    workload = replace(problem.workload, layers=(ends[0], block, ends[-1]), batch=4)
    head = replace(workload.layers[-1], products=(Product(width, 1000, "columns"),), width=width)
    table = replace(workload.layers[0], table_parameters=1000 * width, width=width)
    workload = replace(workload, layers=(table, block, head))
    state = 18 * sum(layer.parameters for layer in workload.layers)
    device = replace(problem.devices["one"], memory_bytes=0.7 * state, usable_bytes=0.7 * state)
    inside, outside = Link(1e-6, 4e9), Link(1e-5, 4e8)
    pool = NodePool("one", 2, 2, "one", inside, outside)
    return Problem(workload, Cluster((pool,)), {"one": device})


@pytest.mark.parametrize(("seed", "heads"), [(0, 2), (1, 4), (2, 1), (3, 4)])
def test_the_best_pair_of_degrees_is_that_of_brute_force(seed: int, heads: int) -> None:
    problem = unlike_parts(seed, heads)
    limits = Limits(zero=(1,), schedules=("1f1b",), recompute=("none",), by_part=True)
    found = search(problem, limits)
    assert found.best.cost.step_s == pytest.approx(least_step(problem, limits), rel=1e-9)
    plain = search(problem, replace(limits, by_part=False))
    assert found.best.cost.step_s < 0.96 * plain.best.cost.step_s
    attention, feed = found.best.choice.part_tp
    assert attention < feed, "what is small is not cut, and what fits on no device is"
