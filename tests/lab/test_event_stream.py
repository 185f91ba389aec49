"""Traces as one stream of events: what readers make of files, the form of the file, mutations."""

from __future__ import annotations

import itertools
import json
import lzma
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from holdfast.errors import DataError
from holdfast_lab.traces.events import EventStream, changes_of_stream, check_events
from holdfast_lab.traces.node_changes import DEFAULTS
from holdfast_lab.traces.reading import load_trace, merge_streams, read_stream
from holdfast_lab.traces.scenario import with_notices, without_gaps
from holdfast_lab.traces.stream_file import format_stream, parse_stream
from holdfast_lab.traces.summary import churn_of, levels_of

NAMED = "0,add,n1\n0,add,n2\n60000,add,n3\n120000,remove,n1\n120000,remove,n2\n180000,add,n4\n"
TICKS = json.dumps({"metadata": {"gap_seconds": 300}, "data": [4, 4, 1, 0, 3, 4]})
OUTAGES = (
    "System,nodes,nodenumz,Prob Started,Prob Fixed,Down Time,Hardware\n"
    "2,3,0,1/1/2000 10:00,1/1/2000 11:00,60,CPU\n"
    "2,3,1,1/1/2000 9:00,1/1/2000 9:30,30,\n"
    "2,3,1,1/1/2000 15:00,1/1/2000 15:10,10,\n"
)
STAYS = (
    "SN,location,insert,remove,duration,out,event\n"
    "1,c0,2014-01-01 00:00:00,2014-02-01 00:00:00,9,,DBE\n"
    "2,c1,2014-01-01 00:00:00,2014-03-01 00:00:00,9,,\n"
    "1,c2,,2014-02-05 00:00:00,,,OTB\n"
    "3,c3,2014-01-05 00:00:00,2014-01-09 00:00:00,9,,\n"
)
COMPONENTS = "component,category,count,percent\nGPU,GPU,3,1\nNIC,network,2,1\n"
PRICES = (
    "date,machine_type,region,usd_per_hour_on_demand,usd_per_hour_spot\n"
    "2024-01-01,a2,r1,10,2.5\n2024-01-05,a2,r1,,3.5\n2024-01-03,a2,r2,10,2\n"
)
MIX = "timestamp,WND,COL,avg_CI\n" + "".join(
    f"2022-01-01 {hour:02}:00:00+00:00,10,90,{400 + hour}\n" for hour in range(6)
)
SIGNAL = "oootime,North\n2023-06-08 00:00:00,425.5\n2023-06-08 00:05:00,90.25\n"
LINKS = (
    "src_region,dst_region,throughput_sent,throughput_received,success\n"
    "a:x,b:y,6e9,5e9,True\na:x,a:z,1,1,False\n"
)
LISTS = (
    '[0, "add", {"nodes": ["a", "b"], "duration": 60000}]\n'
    '[60000, "migration", {"nodes": [], "duration": 60000}]\n'
    '[120000, "remove", {"nodes": ["a"], "duration": 60000}]\n'
)
MINUTES = json.dumps(
    [{"interval": [0, 3, 0], "duration": 60000}, {"interval": [3, 1, 2], "duration": 60000}]
)
FILES = {
    "named": NAMED,
    "ticks": TICKS,
    "outages": OUTAGES,
    "stays": STAYS,
    "lists": LISTS,
    "components": COMPONENTS,
    "prices": PRICES,
    "mix": MIX,
    "signal": SIGNAL,
    "links": LINKS,
    "minutes": MINUTES,
    "counts": "0,3\n60000,1\n120000,2\n",
    "dated": "2021-12-11, 10:00:00, 4\n2021-12-11, 10:01:00, 2\n2021-12-11, 10:02:00, 3\n",
    "points": '[{"Time": 0.0, "GPUs": 4}, {"Time": 9.5, "GPUs": 2}]',
    "lives": "lifetime_s,other_ops\n500,x.preempted\n900,stopped\n7000,preempted;x\n",
    "transfers": "src,dest,cost\na,b,0.02\n",
    "steps": '{"step_t_nodelay": {"1": 2.0, "2": 3.0}, "step_t_noblk": {"1": 1.0, "2": 3.0}}',
}


def stream(text: str | bytes, **options: Any) -> EventStream:
    data = text.encode() if isinstance(text, str) else text
    return read_stream(data, "t", replace(DEFAULTS, nodes=3, days=2.0, **options))


def plain(found: EventStream) -> list[tuple[float, str, str, float]]:
    return [(e.t_s, e.kind, e.node or e.zone, e.value) for e in found.events]


def test_named_nodes_become_joins_and_departures_with_their_rows() -> None:
    found = stream(NAMED)
    assert plain(found)[-3:] == [
        (120, "preempt", "n1", 0),
        (120, "preempt", "n2", 0),
        (180, "join", "n4", 1),
    ]
    assert found.events[-1].source == "t:6"
    assert (found.header.victim_rule, found.header.rows, found.seconds) == ("given", 6, 180)


def test_outages_fail_and_recover_and_all_nodes_are_there() -> None:
    found = stream(OUTAGES)
    fails = [e for e in found.events if e.kind == "fail"]
    assert [(e.node, e.value) for e in fails] == [
        ("system-2/1", 1800),
        ("system-2/0", 3600),
        ("system-2/1", 600),
    ]
    assert fails[1].extra == {"cause": "Hardware: CPU"}
    churn = churn_of(found)
    assert (churn.nodes, churn.at_start, churn.lost, churn.by_node["system-2/1"]) == (3, 3, 3, 2)
    assert found.header.disorder == 1


def test_stays_end_by_an_event_a_move_or_with_the_file() -> None:
    found = stream(STAYS)
    ends = {e.node: (e.kind, e.extra.get("cause")) for e in found.events if e.kind != "join"}
    assert ends == {
        "1@c0#1": ("fail", "DBE"),
        "1@c2#1": ("fail", "OTB"),
        "3@c3#1": ("preempt", None),
    }
    assert "1 stays without a start got one of 1 s, first in t:4" in found.header.notes


def test_prices_hold_until_the_next_and_intensities_have_their_mean() -> None:
    price = levels_of(stream(PRICES), "price")
    assert [(each.name, each.changes) for each in price] == [("a2 r1", 2), ("a2 r2", 1)]
    assert price[0].mean == pytest.approx(2.5)
    carbon = levels_of(stream(MIX), "carbon")[0]
    assert (carbon.mean, carbon.least) == (402.5, 400)
    small = MIX.replace("01:00:00+00:00,10,90", "01:00:00+00:00,1,2")
    assert (
        "1 hours report below 30 % of the usual generation: left out" in stream(small).header.notes
    )
    assert stream(SIGNAL, carbon="marginal").header.trace == "marginal carbon"


def test_links_have_gigabits_and_failed_measurements_are_left_out() -> None:
    assert plain(stream(LINKS)) == [(0, "net", "a:x->b:y", 5.0)]


def test_a_rank_is_slow_by_the_medians_of_its_stage() -> None:
    found = stream(FILES["steps"])
    assert [e.value for e in found.events if e.kind == "slow"] == [2, 1]
    assert found.header.extra["slowdown"] == pytest.approx(1.25)


@pytest.mark.parametrize(
    ("victims", "burst", "left"),
    [("lifo", "any", ["n1", "n2", "n3"]), ("fifo", "any", ["n6", "n7", "n8"])],
)
def test_counts_lose_the_youngest_or_the_oldest(victims: str, burst: str, left: list[str]) -> None:
    found = stream("0,8\n60000,3\n", victims=victims, burst=burst)
    gone = {e.node for e in found.events if e.kind == "preempt"}
    assert [f"n{k}" for k in range(1, 9) if f"n{k}" not in gone] == left


def test_victims_are_neighbours_or_spread() -> None:
    def ranks(burst: str) -> list[int]:
        found = stream("0,20\n60000,15\n", burst=burst, seed=3)
        return sorted(int(e.node[1:]) for e in found.events if e.kind == "preempt")

    near, far = ranks("neighbours"), ranks("spread")
    assert near[-1] - near[0] == 4
    assert {b - a for a, b in itertools.pairwise(far)} == {4}


def test_notices_come_before_departures_but_not_before_the_join() -> None:
    found = with_notices(stream("0,add,a\n9000,add,b\n10000,remove,b\n90000,remove,a\n"), 30)
    notices = [(e.t_s, e.node, e.value) for e in found.events if e.kind == "notice"]
    assert notices == [(9, "b", 1), (60, "a", 30)]
    check_events(found.events, ["t"] * len(found.events))


def test_a_gap_is_held_taken_out_or_cut_at() -> None:
    rows = [f"2021-12-11, 10:{minute:02}:00, {8 - minute % 3}" for minute in range(30)]
    rows += ["2021-12-11, 12:00:00, 8", "2021-12-11, 12:01:00, 2"]
    held = stream("\n".join(rows))
    assert without_gaps(held, "hold") == held
    skipped, cut = without_gaps(held, "skip"), without_gaps(held, "cut")
    assert (held.seconds, skipped.seconds, cut.seconds) == (7260, 1800, 1740)
    assert churn_of(skipped).at_end == churn_of(held).at_end == 2
    assert churn_of(cut).at_end == 6
    for each in (skipped, cut):
        check_events(each.events, ["t"] * len(each.events))


def test_several_zones_are_merged_by_time_under_names_of_their_own() -> None:
    one, two = stream(TICKS, zone="a"), stream(TICKS, zone="b")
    both = merge_streams([one, two])
    assert churn_of(both).node_days == pytest.approx(2 * churn_of(one).node_days)
    assert both.header.zones == ("a", "b")
    check_events(both.events, ["t"] * len(both.events))
    unnamed = merge_streams([stream(TICKS), stream(TICKS)])
    check_events(unnamed.events, ["t"] * len(unnamed.events))


@pytest.mark.parametrize("kind", sorted(FILES))
def test_a_stream_is_the_same_after_it_was_written(kind: str) -> None:
    found = stream(FILES[kind])
    text = "\n".join(format_stream(found))
    assert parse_stream(text, "t") == found
    churn = churn_of(found)
    if churn.lost:
        again = load_trace(text, "t")
        assert sum(len(gone) for _, gone, _ in again.instants()) == churn.lost


def test_keys_that_are_not_known_are_kept_and_disorder_is_sorted() -> None:
    text = (
        '{"trace": "t", "more": 1}\n{"t_s": 5, "kind": "preempt", "node": "a", "rack": "r1"}\n'
        '{"t_s": 0, "kind": "join", "node": "a", "value": 8}\n'
        '{"t_s": 0, "kind": "join", "node": "a", "value": 8}\n'
    )
    found = parse_stream(text, "t")
    assert (found.header.disorder, found.header.duplicates) == (1, 1)
    assert found.events[1].extra == {"rack": "r1"}
    assert '"rack": "r1"' in list(format_stream(found))[2]
    assert '"more": 1' in next(format_stream(found))
    assert [c.kind for c in changes_of_stream(found).changes] == ["join", "go"]


JOIN = '{"t_s": 0, "kind": "join", "node": "a"}\n'


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ('{"t_s": 0, "kind": "vanish", "node": "a"}', "t:2: there is no kind 'vanish' of event"),
        ('{"t_s": -1, "kind": "join", "node": "a"}', "t:2: t_s is -1"),
        ('{"t_s": NaN, "kind": "join", "node": "a"}', "t:2: t_s is 'nan'"),
        (
            '{"t_s": 1e12, "kind": "join", "node": "a"}',
            "t_s is 1e+12; write seconds from the start",
        ),
        ('{"t_s": 0, "kind": "price", "value": -1}', "t:2: value of price is -1"),
        ('{"t_s": 0, "kind": "price", "value": true}', "t:2: value is 'True'"),
        ('{"t_s": 0, "kind": "join"}', "t:2: join names no node"),
        ('{"t_s": 0, "kind": "join", "node": 3}', "t:2: node is '3'"),
        ('{"kind": "join", "node": "a"}', "t:2: there is no t_s"),
        ("0,add,a", "t:2: '0,add,a' is no JSON object"),
        ('{"t_s": 0, "kind": "preempt", "node": "a"}', "t:2: preempt of a without having joined"),
        (JOIN + '{"t_s": 1, "kind": "slow", "node": "a", "value": 0.5}', "t:3: value of slow"),
        (JOIN + '{"t_s": 1, "kind": "join", "node": "a"}', "t:3: a joins twice"),
        (JOIN + '{"t_s": 1, "kind": "recover", "node": "a"}', "t:3: a recovers, and nothing"),
        (
            JOIN + '{"t_s": 1, "kind": "preempt", "node": "a"}\n'
            '{"t_s": 2, "kind": "join", "node": "a"}',
            "t:4: a joins twice",
        ),
    ],
)
def test_events_that_cannot_be_are_refused_with_line_and_remedy(rows: str, says: str) -> None:
    with pytest.raises(DataError) as refused:
        parse_stream('{"trace": "t"}\n' + rows, "t")
    assert says in str(refused.value)
    assert refused.value.remedy


# --- files of other people ----------------------------------------------------------------------
SAME: dict[str, Callable[[str], bytes]] = {
    "CRLF": lambda text: text.replace("\n", "\r\n").encode(),
    "a byte order mark": lambda text: b"\xef\xbb\xbf" + text.encode(),
    "UTF-16": lambda text: text.encode("utf-16"),
    "xz": lambda text: lzma.compress(text.encode()),
    "empty lines at the end": lambda text: (text + "\n\n").encode(),
}
TABLES = sorted(set(FILES) - {"ticks", "lists", "minutes", "points", "steps"})


@pytest.mark.parametrize("kind", sorted(FILES))
@pytest.mark.parametrize("change", sorted(SAME))
def test_how_a_text_was_written_changes_nothing(kind: str, change: str) -> None:
    assert stream(SAME[change](FILES[kind])).events == stream(FILES[kind]).events


@pytest.mark.parametrize("kind", TABLES)
def test_other_delimiters_and_quotes_change_nothing(kind: str) -> None:
    text, want = FILES[kind], stream(FILES[kind]).events
    assert stream(text.replace(",", "\t")).events == want
    if kind != "lives":  # its operations are separated by that
        assert stream(text.replace(",", ";")).events == want
    quoted = "\n".join(
        ",".join(f'"{cell.strip()}"' for cell in line.split(",")) for line in text.splitlines()
    )
    assert stream(quoted).events == want


@pytest.mark.parametrize("kind", sorted(FILES))
def test_a_mutated_file_is_read_or_refused_with_its_place(kind: str) -> None:
    """Cells and bytes are dropped, doubled, swapped and replaced: no other error comes out."""
    draw = random.Random(f"mutations of {kind}")
    refusals = []
    for _ in range(120):
        data = mutate(FILES[kind], draw)
        try:
            found = read_stream(data, "file", replace(DEFAULTS, nodes=3, days=0.5))
        except DataError as error:
            refusals.append(error)
        else:
            check_events(found.events, ["t"] * len(found.events))
            assert 0 <= churn_of(found).node_days < float("inf")
    assert refusals
    assert all(str(each.where).startswith("file") and each.remedy for each in refusals)


STRANGE = ("", "-1", "x", "nan", "1e999", "0", '"', "\u00e9", "null", "[]", "{}", "99", "true")


def mutate(text: str, draw: random.Random) -> bytes:
    lines = text.splitlines()
    place = draw.randrange(len(lines))
    choice = draw.randrange(6)
    if choice == 0:
        lines[place] = lines[place][: draw.randrange(len(lines[place]) + 1)]
    elif choice == 1:
        lines.insert(draw.randrange(len(lines)), lines[place])
    elif choice == 2:
        draw.shuffle(lines)
    elif choice == 3:
        cells = lines[place].split(",")
        cells[draw.randrange(len(cells))] = draw.choice(STRANGE)
        lines[place] = ",".join(cells)
    elif choice == 4:
        del lines[place]
    data = "\n".join(lines).encode()
    if choice == 5:
        at = draw.randrange(len(data))
        data = data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :]
    return data
