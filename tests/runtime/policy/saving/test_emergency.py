"""What can still be saved before a machine goes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.sharding.boxes import Box, coverage_problem
from holdfast.core.sharding.state_table import TensorSpec
from holdfast.layout import Layout, place_layout
from holdfast.policy.saving.emergency import (
    DEADLINE_MARGIN_SHARE,
    SaveRoute,
    boxes_at_risk,
    plan_emergency,
)

GB = 10**9
PEER = SaveRoute(1, 1.0 * GB, 0.1)
DISK = SaveRoute(2, 2.0 * GB, survives_loss=False, link="disk")
BUCKET = SaveRoute(3, 0.1 * GB, 0.5)


def test_the_tier_that_is_complete_first_goes_first_and_the_next_while_time_is_left() -> None:
    found = plan_emergency(30.0, 2 * GB, [BUCKET, DISK, PEER])
    assert found.tiers == (1, 3)
    assert found.done_after_s == pytest.approx((2.1, 2.1 + 20.5))
    assert found.reason.startswith("2,000 MB into tier 1 by 2.1 s, then tier 3 by 22.6 s: ")
    short = plan_emergency(20.0, 2 * GB, [BUCKET, DISK, PEER])
    assert short.tiers == (1,)
    assert "tier 3 would need 22.6 s" in short.reason


def test_a_link_of_its_own_costs_the_others_no_time() -> None:
    apart = SaveRoute(3, 0.1 * GB, 0.5, link="storage network")
    assert plan_emergency(27.0, 2 * GB, [apart, PEER]).done_after_s == pytest.approx((2.1, 20.5))


def test_where_nothing_can_be_complete_it_says_so() -> None:
    found = plan_emergency(2.0, 10 * GB, [PEER, BUCKET])
    assert found.tiers == ()
    assert found.reason == (
        "nothing can be complete in time: of the 2 s left, 1.6 s are planned with, and for "
        "10,000 MB tier 1 would need 10.1 s, tier 3 would need 100 s"
    )
    assert "no tier survives" in plan_emergency(60.0, GB, [DISK]).reason
    assert plan_emergency(60.0, GB, []).tiers == ()
    assert plan_emergency(60.0, GB, [SaveRoute(1, 0.0)]).tiers == ()


@given(
    st.floats(0, 300),
    st.integers(0, 50 * GB),
    st.lists(st.tuples(st.integers(0, 3), st.floats(1e6, 1e10), st.booleans()), max_size=5),
)
def test_whatever_is_planned_is_done_in_time_and_survives(
    deadline: float, nbytes: int, ways: list[tuple[int, float, bool]]
) -> None:
    routes = [SaveRoute(tier, speed, 0.05, survives) for tier, speed, survives in ways]
    found = plan_emergency(deadline, nbytes, routes)
    assert list(found.done_after_s) == sorted(found.done_after_s)
    assert all(done <= deadline * (1 - DEADLINE_MARGIN_SHARE) for done in found.done_after_s)
    assert len(found.tiers) <= sum(route.survives_loss for route in routes)
    if not found.tiers and any(route.survives_loss for route in routes):
        assert all(
            route.seconds_for(nbytes) > deadline * (1 - DEADLINE_MARGIN_SHARE)
            for route in routes
            if route.survives_loss
        )


TABLE = (TensorSpec("model.a", "F32", (64, 8), 0), TensorSpec("model.b", "F32", (32,), 0))
ALL = 4 * (64 * 8 + 32)


def test_a_node_of_two_replicas_owns_half_of_the_state() -> None:
    topology = place_layout(Layout(dp_replicate=2), 1, ("here", "there"))
    found = boxes_at_risk(topology, TABLE, {"here"})
    assert list(found.boxes) == [0]
    assert found.bytes == ALL // 2


def test_what_the_nodes_own_is_all_of_the_state_and_each_box_once() -> None:
    topology = place_layout(Layout(dp_shard=4), 1, ("a", "a", "b", "b"))
    found = boxes_at_risk(topology, TABLE, {"a"})
    assert sorted(found.boxes) == [0, 1]
    assert found.bytes == ALL // 2
    rest = boxes_at_risk(topology, TABLE, {"b"})
    for spec in TABLE:
        held: list[Box] = [
            box
            for part in (found, rest)
            for boxes in part.boxes.values()
            for box in boxes
            if box.name == spec.name
        ]
        assert coverage_problem(spec.shape, held) is None


def test_a_node_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="no rank is on node c"):
        boxes_at_risk(place_layout(Layout(), 1, ("a",)), TABLE, {"c"})
