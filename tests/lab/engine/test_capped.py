"""Caps on clocks as policies of the simulator: energy and carbon by hand, and the makespan."""

from __future__ import annotations

from math import inf

import pytest

from holdfast.errors import ConfigError
from holdfast_lab.engine.capped import capped
from holdfast_lab.engine.holdfast import holdfast
from holdfast_lab.engine.interfaces import Costs, PolicyMaker
from holdfast_lab.engine.ledger import Ledger
from holdfast_lab.engine.loop import Limits, Simulation
from holdfast_lab.engine.table_cost import linear_cost
from holdfast_lab.traces.events import TraceEvent

COSTS = Costs(start_s=0.0, communicator_s=0.0, save_pause_s=0.0, idle_watts=100, busy_watts=1000)
DAY = 86_400.0
EVENTS = [
    *(TraceEvent(0.0, "join", f"n{index}", value=1.0) for index in range(3)),
    # Clean for 8 hours of each day.
    *(
        TraceEvent(hour * 3600.0, "carbon", "", "", "", 100.0 if hour % 24 < 8 else 400.0)
        for hour in range(14 * 24)
    ),
]
"""Three nodes, of which the run uses two."""


THREE_SHIFTS = [
    *EVENTS[:3],
    *(
        TraceEvent(hour * 3600.0, "carbon", "", "", "", 100.0 + 200.0 * (hour % 24 // 8))
        for hour in range(30 * 24)
    ),
]
"""The same nodes. Each day has 8 hours of 100, 300 and 500 grams."""


def ledger_of(
    maker: PolicyMaker, costs: Costs = COSTS, events: list[TraceEvent] = EVENTS
) -> Ledger:
    """Ten days of work on two nodes."""
    cost = linear_cost(2, 1000.0, 1000.0, costs)
    events = sorted(events, key=lambda event: event.t_s)
    return Simulation(cost, maker(cost), Limits(inf, 10 * DAY * 1000.0)).run(events)


def test_a_node_that_is_powered_down_draws_nothing() -> None:
    on, off = ledger_of(holdfast), ledger_of(capped("powered-down", holdfast))
    assert off.wall_s == on.wall_s
    assert on.joules - off.joules == pytest.approx(100 * on.wall_s, rel=1e-3)


def test_a_steady_cap_takes_the_power_and_the_time_of_its_clock() -> None:
    """Clock 0.9: rate 1 / (0.7 / 0.9 + 0.3), watts 100 + 900 * 0.9^3."""
    full, low = (
        ledger_of(capped("powered-down", holdfast)),
        ledger_of(capped("steady-cap", holdfast)),
    )
    assert low.wall_s / full.wall_s == pytest.approx(0.7 / 0.9 + 0.3, rel=1e-3)
    watts = (100 + 900 * 0.9**3) / 1000
    assert low.joules / full.joules == pytest.approx(watts * (0.7 / 0.9 + 0.3), rel=1e-3)


def test_a_cap_that_follows_carbon_emits_less_than_a_steady_one_and_is_in_time() -> None:
    plain, steady, follows = (
        ledger_of(maker)
        for maker in (holdfast, capped("steady-cap", holdfast), capped("carbon-cap", holdfast))
    )
    assert follows.finished
    assert follows.wall_s <= 1.1 * plain.wall_s
    assert follows.grams_co2 < 0.97 * steady.grams_co2
    assert follows.grams_co2 < 0.8 * plain.grams_co2


def test_devices_of_unknown_power_are_refused() -> None:
    with pytest.raises(ConfigError, match="carbon-cap needs it"):
        ledger_of(capped("carbon-cap", holdfast), Costs())


def test_a_run_with_time_pauses_in_dirty_hours_and_ends_in_time() -> None:
    """It may take 1.6 times as long, so it leaves out the 8 dirtiest hours of a day."""
    full, paused = (
        ledger_of(capped(name, holdfast, 1.6), events=THREE_SHIFTS)
        for name in ("powered-down", "carbon-pause")
    )
    assert paused.finished
    assert paused.wall_s <= 1.6 * full.wall_s
    assert paused.seconds["stopped"] == pytest.approx(paused.wall_s / 3, rel=0.05)
    assert paused.joules == pytest.approx(full.joules, rel=0.01), "the same work at full clock"
    assert paused.grams_co2 < 0.8 * full.grams_co2


def test_caps_and_pauses_together_emit_less_than_each_alone() -> None:
    cap, pause, both = (
        ledger_of(capped(name, holdfast, 2.5), events=THREE_SHIFTS)
        for name in ("carbon-cap", "carbon-pause", "carbon-cap-pause")
    )
    assert both.by_reason["pause"] > 5
    assert both.grams_co2 < 0.9 * min(cap.grams_co2, pause.grams_co2)


def test_without_time_to_lose_a_run_does_not_pause() -> None:
    steady, paused = (
        ledger_of(capped(name, holdfast, 1.0)) for name in ("powered-down", "carbon-pause")
    )
    assert paused.wall_s == steady.wall_s
    assert "pause" not in paused.by_reason
