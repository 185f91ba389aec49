"""Columns and keys of files that other people wrote: used, counted, or refused with their place."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from holdfast.borders import Border
from holdfast.errors import DataError
from holdfast_lab.prediction.reading import read_history
from holdfast_lab.traces.columns import (
    ADVISOR,
    COMPONENTS,
    EVENT,
    HEADER,
    INTERVALS,
    LINKS,
    LISTED,
    LIVED,
    LIVES,
    MIX,
    NAMED,
    OPERATIONS,
    OUTAGES,
    POINTS,
    PRICES,
    STAYS,
    STEPS,
    TICKS,
    TICKS_METADATA,
    TRANSFERS,
)
from holdfast_lab.traces.events import EventStream
from holdfast_lab.traces.node_changes import DEFAULTS
from holdfast_lab.traces.reading import load_trace, merge_streams, read_stream
from tests.lab import test_event_stream as files
from tests.support.borders import unknown_entries

OPTIONS = replace(DEFAULTS, nodes=3, days=2.0)
_ADVISOR = {"spot_advisor": {"r1": {"Linux": {"a2": {"r": 1}}}}}
_LIVED = "lifetime_s,other_ops,insert_end_time\n500,x.preempted,2024-01-01 00:00:00\n"
_EVENT = {"t_s": 0, "kind": "join", "node": "a", "zone": "z", "gpu": "g", "value": 1, "source": "s"}


def read(data: str | bytes, **options: Any) -> EventStream:
    given = replace(OPTIONS, **options)
    return read_stream(data.encode() if isinstance(data, str) else data, "t", given)


def _table(text: str) -> Any:
    """The table with more columns, and its stream."""

    def made(more: Mapping[str, object]) -> EventStream:
        head, *rows = text.splitlines()
        cells = ["" if v is None else str(v).replace(",", ";") for v in more.values()]
        lines = [",".join([head, *more]), *(",".join([row, *cells]) for row in rows)]
        data = "\n".join(lines).encode()
        reader = read_history if "insert_end_time" in head else read_stream
        return reader(data, "t", OPTIONS)

    return made


def _named(more: Mapping[str, object]) -> EventStream:
    head = ",".join(["time_ms", "change", "node", *more])
    return read(f"{head}\n0,add,n1,{','.join('x' for _ in more)}\n60000,remove,n1\n")


def _parquet(more: Mapping[str, object]) -> EventStream:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    row = dict.fromkeys(OPERATIONS.used, 0.5) | {"optype": "forward-compute", "step": 1}
    table = pyarrow.table({name: [value] for name, value in (row | dict.fromkeys(more, 1)).items()})
    buffer = io.BytesIO()
    parquet.write_table(table, buffer)
    return read(buffer.getvalue())


def _stream(header: Mapping[str, object], event: Mapping[str, object]) -> EventStream:
    return read("\n".join(map(json.dumps, ({"trace": "t", **header}, {**_EVENT, **event}))))


WITH: list[tuple[Border, Any]] = [
    (OUTAGES, _table(files.OUTAGES)),
    (STAYS, _table(files.STAYS)),
    (COMPONENTS, _table(files.COMPONENTS)),
    (LIVES, _table(files.FILES["lives"])),
    (LIVED, _table(_LIVED)),
    (PRICES, _table(files.PRICES)),
    (MIX, _table(files.MIX)),
    (LINKS, _table(files.LINKS)),
    (TRANSFERS, _table(files.FILES["transfers"])),
    (NAMED, _named),
    (OPERATIONS, _parquet),
    (TICKS, lambda more: read(json.dumps({**json.loads(files.TICKS), **more}))),
    (
        TICKS_METADATA,
        lambda more: read(json.dumps({"metadata": {"gap_seconds": 5, **more}, "data": [1, 2]})),
    ),
    (LISTED, lambda more: read(json.dumps([0, "add", {"nodes": ["a"], **more}]))),
    (
        INTERVALS,
        lambda more: read(json.dumps([{"interval": [0, 3, 0], "duration": 60000, **more}])),
    ),
    (POINTS, lambda more: read(json.dumps([{"Time": 0.0, "GPUs": 4, **more}]))),
    (STEPS, lambda more: read(json.dumps({**json.loads(files.FILES["steps"]), **more}))),
    (ADVISOR, lambda more: read(json.dumps(_ADVISOR | more), zone="r1", gpu="a2")),
    (HEADER, lambda more: _stream(more, {})),
    (EVENT, lambda more: _stream({}, more)),
]


@pytest.mark.parametrize(("border", "made"), WITH, ids=[border.name for border, _ in WITH])
def test_what_is_not_read_is_counted_or_refused_with_its_name(border: Border, made: Any) -> None:
    plain = made({})
    for name, value in (unknown_entries(border, 8) | {"zzqqyy": 0}).items():
        refused, found = None, plain
        try:
            found = made({name: value})
        except DataError as error:
            refused = error
        words = [str(refused)] if refused else found.header.notes
        assert any(name in each and "t" in each for each in words), (name, words)
        extra = [replace(event, extra={}) for event in found.events]
        assert extra == [replace(event, extra={}) for event in plain.events]
    if border is not NAMED and border is not OPERATIONS:
        assert made({"currency": "USD"})
        with pytest.raises(DataError, match="currency EUR"):
            made({"currency": "EUR"})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (files.OUTAGES.replace("1/1/2000 11:00", "1/1/2000 9:00"), "t:2: Prob Fixed is before"),
        (files.STAYS.replace("2014-02-01", "2013-02-01"), "t:2: remove is before insert"),
        (
            files.OUTAGES.replace("Fixed,Down", "Fixed,down").replace(",60,", ",1 h,"),
            "Down Time is",
        ),
        (files.PRICES.replace("usd_per_hour_spot", "usd_per_minute_spot"), "usd_per_minute_spot"),
        (files.PRICES.replace("_hour_on", "_minute_on"), "'usd_per_hour_on_demand'"),
        (files.PRICES.replace("2.5", '"2,5"'), "t:2: usd_per_hour_spot is '2,5'"),
        (files.PRICES.replace("r1,10,2.5", "r1,$10,2.5"), "t:2: usd_per_hour_on_demand is '$10'"),
        (files.LINKS.replace("True", "failed"), "t:2: "),
        (
            "time_ms,usd_per_hour\n0,3\n60000,4\n",
            "'usd_per_hour' would be read as a number of nodes",
        ),
        ("date,usd_per_hour\n2024-01-01,3\n2024-01-02,4\n", "number of nodes"),
        ("date,usd_per_hour\n2024-01-01,3.5\n2024-01-02,4\n", "gCO2/kWh"),
        ("time,z_lbs_per_mwh\n2024-01-01 00:00,800.5\n2024-01-01 01:00,801\n", "gCO2/kWh"),
        ("1700000000,3\n1700000060,4\n", "seconds since 1970, read as milliseconds"),
        ('[{"Time": 1700000000000, "GPUs": 4}]', "milliseconds, or less"),
        ('[{"interval": [0, 3, 0], "duration": 60}]', "no interval is longer than 60 ms"),
        (json.dumps(_ADVISOR | {"ranges": [{"max": 9}]}), "ranges"),
    ],
)
def test_another_unit_or_a_row_that_cannot_be_is_refused(text: str, says: str) -> None:
    with pytest.raises(DataError) as refused:
        read(text, zone="r1" if "spot_advisor" in text else "")
    assert says in str(refused.value)


@pytest.mark.parametrize("header", ["time_s,count", "elapsed seconds,nodes", "timeSec,numNodes"])
def test_the_unit_of_a_header_is_used(header: str) -> None:
    assert [e.t_s for e in read(f"{header}\n0,1\n60,2\n").events] == [0, 60]
    assert load_trace("time_h,event,node\n0,add,a\n2,remove,a\n", "t").seconds == 7200


def test_repairs_are_counted_with_their_first_place() -> None:
    zero = files.OUTAGES.replace("1/1/2000 9:30,30", "1/1/2000 9:00,0")
    assert any("Fixed at the same time, first in t:3" in note for note in read(zero).header.notes)
    assert load_trace(zero, "t").notes == read(zero).header.notes[-3:]
    twice = files.PRICES + "2024-01-01,a2,r1,,2.75\n"
    assert any("contradict" in note and "t:5" in note for note in read(twice).header.notes)
    both = merge_streams([read(files.PRICES), read(files.MIX)])
    assert "begin at 2024-01-01 00:00:00 and 2022-01-01 00:00:00" in both.header.notes[-1]
    both = merge_streams([read(files.PRICES), read(files.PRICES)])
    assert "price a2 r1 is in two files: the last change counts" in both.header.notes
    mixed = files.MIX.replace("03:00:00+00:00", "03:00:00")
    assert any("1 of 6 dates have no time zone" in note for note in read(mixed).header.notes)
