"""Which rung of the recovery ladder a generation that lacks some ranks is said to have taken."""

from __future__ import annotations

import pytest

from holdfast.elastic.coordinator.survivors import RecoveryPlan
from holdfast.layout import Layout, place_layout
from holdfast.policy.recovery.rank_assignment import RankAssignment
from holdfast.policy.recovery.survivors import ResumePoint
from tests.runtime.elastic.coordinator.test_survivors import _survivors


@pytest.mark.parametrize(
    ("came_from", "rung"),
    [((0, 1), 0), ((2, 3), 0), ((1, 0), 4), ((0, 3), 4), ((0, None), 4), (None, 4)],
)
def test_only_a_replica_that_is_whole_goes_on(
    came_from: tuple[int | None, ...] | None, rung: int
) -> None:
    """One that is put together from two broken ones is another layout of what is left."""
    before = place_layout(Layout(dp_replicate=2, tp=2), 1, tuple("abcd"))
    now = place_layout(Layout(tp=2), 2, tuple("ab"))
    point = None if came_from is None else ResumePoint(1, frozenset())
    after = RecoveryPlan(RankAssignment((1, 2), came_from or (None, None)), point, "", before)
    durable = False if came_from in (None, (0, None)) else None
    assert _survivors(before).recover(before, now, after, "abcd", durable).rung == rung
