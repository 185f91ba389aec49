"""Retention: what may go, and what must not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.policy.saving.retention import removable_steps


def test_keeps_the_newest_and_every_nth() -> None:
    assert removable_steps([10, 20, 30, 40, 50], keep_last=2) == [10, 20, 30]
    assert removable_steps([10, 20, 30, 40, 50], keep_last=1, keep_every=20) == [10, 30]


def test_never_removes_the_newest_verified() -> None:
    assert removable_steps([10, 20, 30, 40], keep_last=1, verified=[10, 20]) == [10, 30]
    assert removable_steps([10, 20, 30, 40], keep_last=1, verified=[40]) == [10, 20, 30]


def test_refuses_to_keep_nothing() -> None:
    with pytest.raises(ValueError, match="keep_last"):
        removable_steps([1], keep_last=0)


@given(
    st.sets(st.integers(0, 200)), st.integers(1, 5), st.integers(0, 7), st.sets(st.integers(0, 200))
)
def test_repeating_it_removes_nothing_more(
    steps: set[int], last: int, every: int, verified: set[int]
) -> None:
    gone = set(removable_steps(steps, last, every, verified))
    left = steps - gone
    assert gone <= steps
    assert len(left) >= min(last, len(steps))
    assert removable_steps(left, last, every, verified) == []
