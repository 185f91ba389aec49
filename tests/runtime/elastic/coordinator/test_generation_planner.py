"""Which rung of the recovery ladder a generation that lacks some ranks is said to have taken."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.elastic.coordinator.generation_planner import _recovery_rung
from holdfast.layout import Layout, place_layout


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
    after: Any = SimpleNamespace(previous_topology=before, came_from=came_from)
    assert _recovery_rung(before, now, after, None) == rung
