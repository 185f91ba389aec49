"""The next plans: each likely loss, the layout for the rest, and the bytes that move."""

from __future__ import annotations

import pytest

from holdfast.plan.cost.choice import Choice
from holdfast.plan.objective.goodput import GoodputModel
from holdfast.plan.objective.next_plans import NextPlan, next_plans
from holdfast.plan.objective.recoveries import recovery_of
from holdfast.plan.search.search import Limits, search
from tests.runtime.plan.objective.problems import layout, pool, problem


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
