"""Loaders, on files that the tests write: order, gaps, duplicates, strange rows."""

from __future__ import annotations

import json

import pytest

from holdfast.errors import DataError
from holdfast_lab.traces.counts import parse_ticks
from holdfast_lab.traces.failures import parse_outages
from holdfast_lab.traces.lives import survival_curve
from holdfast_lab.traces.node_changes import Trace
from holdfast_lab.traces.reading import load_trace, read_stream

NAMED = "0,add,n1\n0,add,n2\n60000,add,n3\n120000,remove,n1\n120000,remove,n2\n180000,add,n4\n"


def _counts(trace: Trace) -> list[tuple[float, int]]:
    """(time, how many are there) after every instant."""
    there = 0
    out = []
    for at, gone, joined in trace.instants():
        there += len(joined) - len(gone)
        out.append((at, there))
    return out


def test_named_nodes_come_and_go_and_a_burst_stays_a_burst() -> None:
    found = load_trace(NAMED, "a.csv")
    assert found.kind == "named nodes"
    assert _counts(found) == [(0, 2), (60, 3), (120, 1), (180, 2)]
    assert [(at, gone) for at, gone, _ in found.instants() if gone] == [(120, ["n1", "n2"])]
    assert (found.seconds, found.step, found.rows, len(found.sha256)) == (180, 60, 6, 64)


def test_disorder_is_sorted_and_duplicates_are_dropped_and_both_are_told() -> None:
    lines = NAMED.splitlines()
    found = load_trace("\n".join([*lines[3:], *lines[:3], lines[0]]), "a.csv")
    assert found.changes == load_trace(NAMED, "a.csv").changes
    assert (found.disorder, found.duplicates) == (2, 1)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0,add,n1\n60,gone,n1\n", "a.csv:2: '60,gone,n1' is no row; write 'time_ms,add,node'"),
        ("0,add,n1\nx,add,n2\n", "a.csv:2: 'x' is no time or length of time; write a number"),
        ("0,add,n1\n-5,add,n2\n", "a.csv:2: '-5' is no time"),
        ("0,add,n1\n5,remove,n2\n", "a.csv:2: n2 goes without having joined; give every stay"),
        ("0,add,n1\n5,remove,n1\n9,add,n1\n", "a.csv:3: n1 joins twice"),
        ("2021-12-11, 11:11:30, 5\n2021-12-11, 11:71:30, 5\n", "a.csv:2: "),
        ("2021-12-11, 11:11:30, 5\n2021-12-11, 11:12:30, -5\n", "'-5' is no number of nodes"),
        ("0,3\n5,x\n", "a.csv:2: 'x' is no number of nodes; write a whole number"),
        (f"0,3\n5,{'9' * 5000}\n", "is no number of nodes; write a whole number, 0 to 1,000,000"),
        ("0,3\n5,1000001\n", "a.csv:2: '1000001' is no number of nodes"),
        ("Timestamp,A_z\n0,3\n5,2.5\n", "line 3: 2.5 is no number of nodes"),
        ("Timestamp,A_z\n0,3\n5,-0.5\n", "line 3: -0.5 is no number of nodes"),
        ('{"data": [1, -2], "metadata": {"gap_seconds": 5}}', "a.csv: data[1]: -2 is no number"),
        ('{"data": [1], "metadata": {}}', "not JSON with 'data' and 'metadata.gap_seconds'"),
        ('{"data": [], "metadata": {"gap_seconds": 5}}', "give a positive gap_seconds"),
        ("name,lifetime_s\nx,3\n", "a.csv:1: there is no column 'other_ops'"),
        ("name,lifetime_s,other_ops\nx,-3,\n", "a.csv:2: '-3' is no time"),
        ("name,lifetime_s,other_ops\nx\n", "give all 3 columns"),
        ("Prob Started,Prob Fixed,System,nodenumz\nnever,never,2,0\n", "'never' is no time"),
        ("hello\n", "this is no trace of a known kind; give rows"),
        ("", "this is no trace of a known kind"),
    ],
)
def test_what_cannot_be_is_refused_with_place_and_remedy(text: str, says: str) -> None:
    with pytest.raises(DataError) as refused:
        load_trace(text, "a.csv")
    assert says in str(refused.value)
    assert refused.value.remedy


def test_dated_counts_know_their_gaps() -> None:
    rows = [f"2021-12-11, 10:{minute:02}:00, {8 - minute % 3}" for minute in range(30)]
    rows += ["2021-12-11, 12:00:00, 8", "2021-12-11, 12:01:00, 2"]
    found = load_trace("\n".join(rows), "a.txt")
    assert (found.kind, found.step, found.started) == ("dated counts", 60, "2021-12-11 10:00:00")
    assert found.unknown == ((29 * 60, 7200),)
    assert _counts(found)[-1] == (7260, 2)
    lost = [len(gone) for _, gone, _ in found.instants() if gone]
    assert lost[-1] == 6


def test_of_several_counts_of_one_time_the_last_is_the_state() -> None:
    found = load_trace("0,1\n0,2\n0,1\n0,3\n60000,2\n180000,5\n", "a.csv")
    assert found.kind == "timed counts"
    assert _counts(found) == [(0, 3), (60, 2), (180, 5)]
    assert found.unknown == ()


def test_ticks_tolerate_other_keys_and_the_clock_can_be_given() -> None:
    value = {"prices": [1.0], "data": [4, 4, 1, 0, 0, 4], "metadata": {"gap_seconds": 300, "x": 1}}
    found = load_trace(json.dumps(value), "a.json")
    assert _counts(found) == [(0, 4), (600, 1), (900, 0), (1500, 4)]
    assert (found.seconds, found.step) == (1800, 300)
    assert parse_ticks(json.dumps(value), "a.json", gap_seconds=60).seconds == 360


def test_who_is_there_at_the_end_has_not_left_and_no_name_is_used_twice() -> None:
    data = [5, 3, 6, 6, 1, 7]
    found = load_trace(json.dumps({"data": data, "metadata": {"gap_seconds": 60}}), "a.json")
    joined = [change.node for change in found.changes if change.kind == "join"]
    assert len(joined) == len(set(joined)) == 5 + 3 + 6
    assert sum(change.kind == "go" for change in found.changes) == 2 + 5


def test_lives_respect_who_was_only_stopped() -> None:
    """Half are taken at 1 h; the others were stopped then: the survivors' share is one half."""
    curve = survival_curve([(3600.0, True)] * 10 + [(3601.0, False)] * 10)
    assert curve[-1][1] == pytest.approx(0.5)
    rows = ["name,lifetime_s,other_ops,more"]
    rows += [f"a{i},{1800 + i},compute.instances.preempted;x,," for i in range(50)]
    rows += [f"b{i},{10 + i},day_of_week,," for i in range(50)]
    found = load_trace("\n".join(rows), "a.csv")
    assert found.kind == "lifetimes"
    first = min(change.seconds for change in found.changes if change.kind == "go")
    assert first >= 1800


def test_outages_of_one_system_are_not_pooled_with_others() -> None:
    head = "System,other,nodenumz,Prob Started,Prob Fixed\n"
    rows = (
        "2,x,0,1/1/2000 10:00,1/1/2000 11:00\n"
        "2,x,1,1/1/2000 9:00,1/1/2000 9:30\n"
        "2,x,0,1/1/2000 10:30,1/1/2000 12:00\n"
        "2,x,0,1/1/2000 15:00,1/1/2000 15:10\n"
        "7,x,0,1/1/1999 15:00,1/1/1999 15:10\n"
    )
    found = load_trace(head + rows, "a.csv")
    assert found.source == "a.csv (system 2)"
    gone = [(change.seconds, change.node) for change in found.changes if change.kind == "go"]
    assert gone == [(0, "1"), (3600, "0"), (6 * 3600, "0")]
    back = [c.seconds for c in found.changes if c.kind == "join" and c.seconds > 0]
    assert back == [1800, 3 * 3600]
    assert found.disorder == 1
    assert parse_outages(head + rows, "a.csv", system="7").rows == 1
    with pytest.raises(DataError, match="no outage of system '9'"):
        parse_outages(head + rows, "a.csv", system="9")


MIX = (
    "time,COL,NG,avg_CI\n2022-01-01 00:00:00+00:00,5,7,400.5\n2022-01-01 01:00:00+00:00,5,8,390.5\n"
)


def test_names_of_columns_count_in_capitals_too() -> None:
    """In capitals, megawatts of coal would else be read as intensities of a zone of that name."""
    small, large = (
        read_stream(text.encode(), "m.csv") for text in (MIX, MIX.replace("avg", "AVG"))
    )
    assert small.events == large.events
    assert [event.value for event in large.events] == [400.5, 390.5]


def test_the_column_of_dates_may_stand_anywhere() -> None:
    lines = [line.split(",") for line in MIX.splitlines()]
    other = "\n".join(",".join(reversed(cells)) for cells in lines)
    one, two = (read_stream(text.encode(), "m.csv") for text in (MIX, other))
    assert one.events == two.events
    zones = "time,z1,z2\n2022-01-01 00:00,400,500\n2022-01-01 01:00,390,510\n"
    moved = "z1,time,z2\n400,2022-01-01 00:00,500\n390,2022-01-01 01:00,510\n"
    one, two = (read_stream(text.encode(), "m.csv") for text in (zones, moved))
    assert one.events == two.events


@pytest.mark.parametrize(
    "text",
    [
        MIX.replace("400.5", "400,5"),
        "time,zone1\n2022-01-01 00:00,400.5\n2022-01-01 01:00,390,5\n",
        "src_region,dst_region,throughput_received\na,b,1000,5\n",
    ],
)
def test_a_decimal_comma_moves_no_values_into_other_columns(text: str) -> None:
    with pytest.raises(DataError, match="quote a cell that has a comma"):
        read_stream(text.encode(), "m.csv")
