"""The token bucket, with a clock of the test's own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.peers.rate_limiter import TokenBucket


class Time:
    """A clock that waiting moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


@given(st.lists(st.tuples(st.integers(1, 5000), st.floats(0, 3)), min_size=1, max_size=60))
def test_no_window_gets_more_than_its_share(takes: list[tuple[int, float]]) -> None:
    time = Time()
    budget = TokenBucket(1000.0, time, time.wait, burst=2000.0)
    log: list[tuple[float, int]] = []
    for count, idle in takes:
        time.wait(idle)
        budget.take(count)
        log.append((time.now, count))
    for first, (begin, _) in enumerate(log):
        passed = 0
        for end, count in log[first:]:
            passed += count
            assert passed <= 2000.0 + 1000.0 * (end - begin) + 5000 + 1e-6


def test_a_long_stream_gets_its_rate_and_no_more() -> None:
    time = Time()
    budget = TokenBucket(1000.0, time, time.wait)
    for _ in range(1000):
        budget.take(64)
    assert 64_000 / (time.now - 100.0) == pytest.approx(1000.0, rel=0.02)
    assert budget.taken_bytes == 64_000


def test_a_pause_is_worth_one_burst() -> None:
    time = Time()
    budget = TokenBucket(1000.0, time, time.wait, burst=500.0)
    time.wait(3600)
    assert budget.take(500) == 0.0
    assert budget.take(100) == pytest.approx(0.1)


def test_no_rate_is_no_bound() -> None:
    time = Time()
    assert TokenBucket(0.0, time, time.wait).take(10**12) == 0.0
    assert time.now == 100.0
