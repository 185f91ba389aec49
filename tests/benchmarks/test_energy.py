"""Replay of energy: by hand, in time on random signals, and never dearer than it need be."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from benchmarks.lab.energy import EnergyRun, EnergyStudy, Hour, hours_of

from holdfast_lab.engine.clocks import NodePower
from holdfast_lab.engine.shifting import PAUSED, Action, Moment, ShiftRules, decide
from holdfast_lab.traces.events import TraceEvent
from holdfast_lab.traces.generators import make_trace

NODE = NodePower(host_w=400.0, idle_w=100.0, busy_w=1100.0)
DAY = 86400.0


def test_by_hand() -> None:
    """1.5 kW for two hours, at 100 and at 300 g; an idle node takes 0.5 kW."""
    hours: list[Hour] = [(0.0, {"a": 100.0}), (3600.0, {"a": 300.0}), (7200.0, {"a": 0.0})]
    out = EnergyStudy(hours, 0, EnergyRun(7200.0, idle_nodes=1), ShiftRules(NODE), "a").run()
    assert out.kwh == pytest.approx(4.0)
    assert out.cost == pytest.approx(2.0 * 100 + 2.0 * 300)
    assert (out.seconds, out.is_done) == (7200.0, True)
    off = EnergyRun(7200.0, idle_nodes=1, idle_off=True)
    assert EnergyStudy(hours, 0, off, ShiftRules(NODE), "a").run().kwh == pytest.approx(3.0)


def test_prices_are_paid_while_nodes_are_held() -> None:
    hours: list[Hour] = [(0.0, {"a": 2.0}), (3600.0, {"a": 4.0}), (7200.0, {"a": 4.0})]
    out = EnergyStudy(
        hours, 0, EnergyRun(7200.0, nodes=3), ShiftRules(NODE, priced=True), "a"
    ).run()
    assert out.cost == pytest.approx(3 * (2.0 + 4.0))


def test_a_signal_holds_until_the_next_and_is_seen_every_hour() -> None:
    events = [
        TraceEvent(0.0, "price", "", "a", "x", 1.0),
        TraceEvent(60.0, "price", "", "b", "x", 5.0),
        TraceEvent(9000.0, "price", "", "a", "x", 3.0),
    ]
    found = hours_of(events, "price")
    assert [at for at, _ in found] == [60.0, 3660.0, 7260.0, 9000.0]
    assert found[0][1] == {"a": 1.0, "b": 5.0}
    assert found[-1][1] == {"a": 3.0, "b": 5.0}


@pytest.mark.parametrize("seed", [1, 2])
def test_every_policy_ends_in_time_and_the_free_one_saves_most(seed: int) -> None:
    hours = hours_of(make_trace("carbon", seed, 12.0, {}).events, "carbon")
    run = EnergyRun(5 * DAY)
    plain = ShiftRules(NODE)
    free = replace(plain, can_cap=True, can_pause=True, powers_down=True)
    base = EnergyStudy(hours, 24, run, plain, "made").run()
    for rules in (replace(plain, can_cap=True), replace(free, can_cap=False), free):
        out = EnergyStudy(hours, 24, run, rules, "made").run()
        assert out.is_done
        assert out.seconds <= 1.1 * run.work_s
        assert out.cost < base.cost


def test_noise_never_makes_a_run_late() -> None:
    draw = random.Random(5)
    hours: list[Hour] = [(3600.0 * k, {"a": draw.uniform(1, 900)}) for k in range(150)]
    rules = ShiftRules(NODE, can_cap=True, can_pause=True, powers_down=True)
    for longest in (1.0, 1.05, 1.5):
        run = EnergyRun(3 * DAY, longest=longest)
        out = EnergyStudy(hours, 0, run, rules, "a").run()
        assert out.is_done
        assert out.seconds <= longest * run.work_s + 1e-6


# --- when a run pauses, slows down or moves -------------------------------------------------------
HOUR = 3600.0
CARBON_NODE = NodePower(host_w=500.0, idle_w=100.0, busy_w=2000.0)
CARBON_DAY = [{"a": 100.0 if 8 <= hour < 16 else 400.0} for hour in range(24)]


def _moment(signal: float, **changes: Any) -> Moment:
    base = Moment(100 * HOUR, 200 * HOUR, {"a": signal}, CARBON_DAY, Action("a", 1.0), "a")
    return replace(base, **changes)


def test_it_pauses_at_dirty_hours_and_trains_at_clean_ones() -> None:
    rules = ShiftRules(CARBON_NODE, can_pause=True, powers_down=True)
    assert decide(_moment(450.0), rules) == PAUSED
    assert decide(_moment(100.0), rules) == Action("a", 1.0)


def test_a_pause_that_costs_more_than_it_spares_is_not_made() -> None:
    """The nodes wait at 0.6 kW, and the hours hardly differ."""
    rules = ShiftRules(CARBON_NODE, can_pause=True)
    even = [{"a": 390.0 + hour % 2} for hour in range(24)]
    assert decide(_moment(391.0, past=even), rules) == Action("a", 1.0)


def test_without_slack_it_trains_at_full_clock_however_dirty_the_hour_is() -> None:
    rules = ShiftRules(CARBON_NODE, can_cap=True, can_pause=True, powers_down=True)
    late = _moment(1000.0, left_s=100.5 * HOUR, action=PAUSED)
    assert decide(late, rules) == Action("a", 1.0)


def test_a_change_that_saves_less_than_it_costs_is_not_made() -> None:
    """The mean of the day is at stake; a start that costs hours of work keeps what is."""
    cheap = ShiftRules(CARBON_NODE, can_move=True, move_s=60.0)
    dear = replace(cheap, move_s=8 * HOUR)
    moment = _moment(300.0, now={"a": 300.0, "b": 280.0}, past=[{"a": 300.0, "b": 280.0}] * 24)
    assert decide(moment, cheap).zone == "b"
    assert decide(moment, dear).zone == "a"


def test_a_cap_follows_the_signal() -> None:
    rules = ShiftRules(CARBON_NODE, can_cap=True)
    tight = {"work_s": 100 * HOUR, "left_s": 110 * HOUR}
    clean, dirty = (decide(_moment(each, **tight), rules).clock for each in (100.0, 400.0))
    assert dirty < clean <= 1.0


@pytest.mark.parametrize("priced", [False, True])
def test_a_run_that_may_do_nothing_trains(priced: bool) -> None:
    assert decide(_moment(400.0), ShiftRules(CARBON_NODE, priced=priced)) == Action("a", 1.0)
