"""The example in which the best layout without failures is not the best with them."""

from __future__ import annotations

import pytest
from benchmarks.lab.layout_replay import run_layout
from benchmarks.lab.plan_failures import EXAMPLE, problem_of

from holdfast.plan.objective.goodput import GoodputModel
from holdfast.plan.objective.objectives import objective_named
from holdfast.plan.search.search import Found, Limits, search

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
