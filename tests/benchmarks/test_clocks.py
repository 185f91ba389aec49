"""The model of caps against the published pair that it was made from, and its limits."""

from __future__ import annotations

import pytest
from benchmarks.lab.clocks import LEAST_CLOCK, NodePower


def test_it_gives_the_published_energy_and_time_under_a_cap() -> None:
    """150 W of 250 W: 13.7 % less energy at 6.8 % more time (arXiv 2205.09646)."""
    device = NodePower(host_w=0.0, idle_w=40.0, busy_w=185.0)
    clock = device.clock_under(150.0)
    longer = 1 / device.rate(clock)
    assert longer == pytest.approx(1.068, abs=0.005)
    assert device.watts(clock) * longer / device.watts(1.0) == pytest.approx(0.863, abs=0.01)


def test_a_cap_above_the_need_changes_nothing_and_a_low_one_ends_at_the_least_clock() -> None:
    node = NodePower(host_w=500.0, idle_w=100.0, busy_w=1000.0)
    assert node.clock_under(2000.0) == 1.0
    assert node.clock_under(10.0) == LEAST_CLOCK
    assert node.rate(1.0) == 1.0
    assert node.watts(1.0) == 1500.0


def test_wrong_watts_are_refused() -> None:
    with pytest.raises(ValueError, match="idle at most busy"):
        NodePower(host_w=0.0, idle_w=200.0, busy_w=100.0)
