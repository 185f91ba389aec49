"""The example in which the best layout without failures is not the best with them."""

from __future__ import annotations

from benchmarks.plan_failures import EXAMPLE, problem_of

from holdfast.plan.objective.goodput import GoodputModel
from holdfast.plan.objective.objectives import objective_named
from holdfast.plan.search.search import Limits, search
from holdfast.simulate.layout_replay import replay


def test_the_best_layout_with_failures_is_another_one_and_wins_in_a_replay() -> None:
    problem = problem_of(EXAMPLE / "run.yaml", str(EXAMPLE / "cluster.yaml"))
    limits = Limits(cp=1, tp=1, zero=(3,), recompute=("none", "full"))
    model = GoodputModel(problem)
    by_time, by_goodput = (
        search(problem, limits, objective_named(name, problem)).best for name in ("time", "goodput")
    )
    assert by_time.choice != by_goodput.choice
    assert by_time.cost.step_s < by_goodput.cost.step_s
    one, other = (
        sum(replay(model, best.choice, best.cost, 30, seed).tokens_per_s for seed in range(2))
        for best in (by_time, by_goodput)
    )
    assert other > 1.02 * one
