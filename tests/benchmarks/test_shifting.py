"""When a run pauses, slows down or moves: at dear hours, with hysteresis, and always in time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from benchmarks.lab.clocks import NodePower
from benchmarks.lab.shifting import PAUSED, Action, Moment, ShiftRules, decide

HOUR = 3600.0
NODE = NodePower(host_w=500.0, idle_w=100.0, busy_w=2000.0)
DAY = [{"a": 100.0 if 8 <= hour < 16 else 400.0} for hour in range(24)]


def _moment(signal: float, **changes: Any) -> Moment:
    base = Moment(100 * HOUR, 200 * HOUR, {"a": signal}, DAY, Action("a", 1.0), "a")
    return replace(base, **changes)


def test_it_pauses_at_dirty_hours_and_trains_at_clean_ones() -> None:
    rules = ShiftRules(NODE, can_pause=True, powers_down=True)
    assert decide(_moment(450.0), rules) == PAUSED
    assert decide(_moment(100.0), rules) == Action("a", 1.0)


def test_a_pause_that_costs_more_than_it_spares_is_not_made() -> None:
    """The nodes wait at 0.6 kW, and the hours hardly differ."""
    rules = ShiftRules(NODE, can_pause=True)
    even = [{"a": 390.0 + hour % 2} for hour in range(24)]
    assert decide(_moment(391.0, past=even), rules) == Action("a", 1.0)


def test_without_slack_it_trains_at_full_clock_however_dirty_the_hour_is() -> None:
    rules = ShiftRules(NODE, can_cap=True, can_pause=True, powers_down=True)
    late = _moment(1000.0, left_s=100.5 * HOUR, action=PAUSED)
    assert decide(late, rules) == Action("a", 1.0)


def test_a_change_that_saves_less_than_it_costs_is_not_made() -> None:
    """The mean of the day is at stake; a start that costs hours of work keeps what is."""
    cheap = ShiftRules(NODE, can_move=True, move_s=60.0)
    dear = replace(cheap, move_s=8 * HOUR)
    moment = _moment(300.0, now={"a": 300.0, "b": 280.0}, past=[{"a": 300.0, "b": 280.0}] * 24)
    assert decide(moment, cheap).zone == "b"
    assert decide(moment, dear).zone == "a"


def test_a_cap_follows_the_signal() -> None:
    rules = ShiftRules(NODE, can_cap=True)
    tight = {"work_s": 100 * HOUR, "left_s": 110 * HOUR}
    clean, dirty = (decide(_moment(each, **tight), rules).clock for each in (100.0, 400.0))
    assert dirty < clean <= 1.0


@pytest.mark.parametrize("priced", [False, True])
def test_a_run_that_may_do_nothing_trains(priced: bool) -> None:
    assert decide(_moment(400.0), ShiftRules(NODE, priced=priced)) == Action("a", 1.0)
