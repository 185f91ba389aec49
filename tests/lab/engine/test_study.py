"""Histories of a trace, and runs to their end."""

from __future__ import annotations

from itertools import islice

import pytest

from holdfast.errors import ConfigError
from holdfast_lab.engine.holdfast import holdfast
from holdfast_lab.engine.interfaces import Costs
from holdfast_lab.engine.settings import as_number
from holdfast_lab.engine.study import Case, estimate, histories_of, repeated, run_case
from holdfast_lab.engine.table_cost import TableCost, linear_cost
from holdfast_lab.traces.events import EventStream, TraceEvent, TraceHeader, check_events

COSTS = Costs(state_bytes=1e9)


def stream(nodes: int, seconds: float = 1000.0) -> EventStream:
    events = [TraceEvent(0.0, "join", f"n{index}", value=1.0) for index in range(nodes)]
    events.append(TraceEvent(600.0, "preempt", "n0"))
    return EventStream(TraceHeader("test", seconds=seconds), tuple(events))


def test_a_history_is_a_part_of_the_trace_with_the_nodes_at_its_start() -> None:
    first, last = histories_of(stream(3), 2)
    assert (first.seconds, last.seconds) == (750.0, 750.0)
    assert [event.kind for event in last.events] == ["join"] * 3 + ["preempt"]
    assert (first.events[-1].t_s, last.events[-1].t_s) == (600.0, 350.0)


def test_a_repeated_trace_is_one_that_can_be() -> None:
    events = list(islice(repeated(stream(3)), 20))
    check_events(events, [""] * len(events))
    assert [event.t_s for event in events if event.node == "n0#1"] == [1000.0, 1600.0]


def test_a_run_is_done_after_as_many_repetitions_as_it_needs() -> None:
    cost = linear_cost(2, 200.0, 200.0, COSTS)
    ledger = run_case(Case("ours", holdfast, cost), [stream(2)], 2_000_000.0).ledgers[0]
    assert ledger.finished
    assert 10_000 < ledger.wall_s < 15_000


def test_a_run_that_never_starts_is_given_up_after_one_pass() -> None:
    cost = TableCost(linear_cost(4, 400.0, 400.0, COSTS, 4).points, COSTS)
    ledger = run_case(Case("ours", holdfast, cost), [stream(2)], 1000.0).ledgers[0]
    assert not ledger.finished
    assert ledger.seconds["stopped"] == pytest.approx(1000.0)


def test_the_interval_of_a_mean_holds_it() -> None:
    found = estimate([1.0, 2.0, 3.0, 6.0])
    assert found.low < found.mean == 3.0 < found.high
    assert estimate([5.0]).low == estimate([5.0]).high == 5.0


@pytest.mark.parametrize(
    ("name", "text", "remedy"),
    [
        ("peers", "2", "give 0 or 1"),
        ("missed_share", "1.5", "give a number from 0 to 1"),
        ("store_bandwidth", "0", "give a number above 0"),
        ("nodes", "0", "give a whole number from 1 to 100000"),
        ("spares", "2.5", "give a whole number from 0 to 100000"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(name: str, text: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is '{text}'; {remedy}"):
        as_number(name, text, "--set")
