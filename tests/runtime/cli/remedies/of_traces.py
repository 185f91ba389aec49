"""Remedies of messages about traces: what is read, converted, checked and written."""

from __future__ import annotations

import io
import json
import lzma
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from re import Match
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from holdfast.show.output import check_target
from holdfast_lab.commands import trace as command
from holdfast_lab.commands.trace_make import lines_of, parameters_of
from holdfast_lab.traces.events import EventStream, TraceEvent, check_events, in_order
from holdfast_lab.traces.generators import fit_trace, make_trace
from holdfast_lab.traces.loading import load_trace
from holdfast_lab.traces.node_changes import DEFAULTS
from holdfast_lab.traces.reading import read_stream
from tests.runtime.cli.remedies.lab import Case, Lab, case, fixed

ROOM = "holdfast_lab/traces/"
OUTAGES = "System,nodenumz,Prob Started,Prob Fixed\n"
LIVES = "lifetime_s,other_ops\n"
ADVISOR = json.dumps({"spot_advisor": {"r1": {"Linux": {"big": {"r": 2}}}}})
CARBON = "timestamp,WND,avg_CI\n"
HEADER = '{"trace": "t"}\n'


def give(content: str | bytes, **options: Any) -> Callable[[Lab], None]:
    data = content.encode() if isinstance(content, str) else content
    return lambda lab: lab.settings.update(data=data, options=options)


def read(lab: Lab) -> EventStream:
    """Read the file as a command does, with the options that were given."""
    return read_stream(lab.settings["data"], "t", replace(DEFAULTS, **lab.settings["options"]))


def good(content: str | bytes, **options: Any) -> Callable[[Lab, Match[str]], None]:
    """Write the file as the remedy says."""
    return lambda lab, found: give(content, **options)(lab)


def of(site: str, bad: str | bytes, remedy: str, mended: str | bytes) -> Case:
    return case(ROOM + site, give(bad), read, remedy, good(mended))


def option(name: str) -> Callable[[Lab, Match[str]], None]:
    """Give the option that the remedy names."""
    return lambda lab, found: lab.settings["options"].update({name: found[1]})


def parquet(**columns: list[Any]) -> bytes:
    rows = {
        "dp_rank": [0],
        "stage": [0],
        "rank": [0],
        "step": [1],
        "optype": ["forward-compute"],
        "start_ts": [0.0],
        "duration": [1.0],
    }
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({**rows, **columns}), out)
    return out.getvalue()


def without_a_column() -> bytes:
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"rank": [0]}), out)
    return out.getvalue()


def perhaps_without_pyarrow(lab: Lab) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if not lab.settings.get("installed"):
            patch.setitem(sys.modules, "pyarrow", None)
        read(lab)


def check(lab: Lab) -> None:
    events = lab.settings["events"]
    check_events(events, ["t"] * len(events))


def convert(lab: Lab) -> None:
    files = [Path(lab.path(name)) for name in lab.settings.get("files", ["a.csv"])]
    to = Path(lab.path(lab.settings.get("to", "b.jsonl")))
    check_target(to, "--to", files)
    stream = command.read_files(files, DEFAULTS, lab.settings.get("zones"))
    command.write_stream(stream, to)


def small(lab: Lab) -> None:
    lab.write("a.csv", "0,add,a\n9,remove,a\n")


EARLY, LATE = TraceEvent(0.0, "join", "a", value=1.0), TraceEvent(5.0, "join", "b", value=1.0)

CASES: list[Case] = [
    case(
        ROOM + "loading.py: this is no trace of a known kind",
        lambda lab: lab.settings.update(text="nothing"),
        lambda lab: load_trace(lab.settings["text"], "t"),
        r"give rows '(time_ms,add\|remove,node)', .*",
        fixed(text="0,add,a\n9,remove,a\n"),
    ),
    of("reading.py: this is no trace of a known kind", "hello", "give rows .*", "0,3\n5,4\n"),
    of("reading.py: the file is empty", " \n", "give rows .*", "0,3\n5,4\n"),
    of(
        "named.py: … …",
        "0,add,a\n5,add,a\n",
        "give every stay of a machine its own name, and one add before its remove",
        "0,add,a\n5,add,b\n",
    ),
    of(
        "named.py: this is no interval",
        '[{"interval": [0, 2], "duration": 60000}]',
        r'write \{"interval": .*',
        '[{"interval": [0, 2, 0], "duration": 60000}]',
    ),
    of(
        "named.py: … nodes are there, and the interval counts … - …",
        '[{"interval": [0, 2, 0], "duration": 9}, {"interval": [5, 0, 0], "duration": 9}]',
        "begin each interval with the nodes that the one before ends with",
        '[{"interval": [0, 2, 0], "duration": 9}, {"interval": [2, 0, 0], "duration": 9}]',
    ),
    of(
        "named.py: this is no point in time",
        '[{"Time": 0, "GPUs": 4}, {"GPUs": 4}]',
        'write {"Time": seconds, "GPUs": n}',
        '[{"Time": 0, "GPUs": 4}, {"Time": 9, "GPUs": 4}]',
    ),
    case(
        ROOM + "named.py: there are … pools, and none is named",
        give(",Timestamp,A_east,B_east\n0,10,4,5\n1,20,4,4\n"),
        read,
        "choose with --gpu and --zone one of: A_east, B_east",
        lambda lab, found: lab.settings["options"].update(gpu="A", zone="east"),
    ),
    of(
        "counts.py: no row has a number of nodes",
        "Timestamp,A_z\n",
        "add a row for each change",
        "Timestamp,A_z\n0,3\n",
    ),
    of(
        "rows.py: … is no number of nodes",
        "0,4\n5,-3\n",
        "write a whole number, 0 to 1,000,000",
        "0,4\n5,0\n",
    ),
    of(
        "counts.py: … is no number of nodes",
        '{"data": [4, -1], "metadata": {"gap_seconds": 5}}',
        "write a whole number, 0 to 1,000,000",
        '{"data": [4, 1], "metadata": {"gap_seconds": 5}}',
    ),
    of(
        "rows.py: … is no time or length of time",
        "0,4\n-5,4\n",
        "write a number, 0 or more",
        "0,4\n5,4\n",
    ),
    of(
        "rows.py: … is no time",
        OUTAGES + "1,2,noon,1/1/2024 1:00\n",
        "write month/day/year hour:minute",
        OUTAGES + "1,2,1/1/2024 12:00,1/1/2024 13:00\n",
    ),
    of(
        "rows.py: give all … columns of the header",
        OUTAGES + "1,2\n",
        "give all 4 columns of the header",
        OUTAGES + "1,2,1/1/2024 1:00,1/1/2024 2:00\n",
    ),
    case(
        ROOM + "rows.py: there is no column …",
        give("lifetime_s\n3\n"),
        read,
        "give a header line with (.*)",
        lambda lab, found: give(found[1].replace(", ", ",") + "\n30000,preempted\n")(lab),
    ),
    of(
        "rows.py: this is no row of a table: …",
        '0,add,a\n5,add,b\n6,add,"c\n9,remove,a\n',
        "close every quote, and double each quote inside of a field",
        '0,add,a\n5,add,b\n6,add,"c"\n9,remove,a\n',
    ),
    of(
        "rows.py: the packed file is damaged, or ends early",
        lzma.compress(b"0,3\n5,4\n")[:-9],
        "fetch it again",
        lzma.compress(b"0,3\n5,4\n"),
    ),
    of(
        "rows.py: there is a byte …, so this is no text",
        b"0,3\n5,4\x00\n",
        "give a text file in UTF-8",
        "0,3\n5,4\n",
    ),
    of(
        "lives.py: no machine of this table was preempted, so none would ever go",
        LIVES + "500000,stop\n",
        "give a table in which other_ops of a row ends in (preempted)",
        LIVES + "500000,stop\n600000,preempted\n",
    ),
    case(
        ROOM + "lives.py: machines live for … s in the mean: … in … days are too many",
        give(LIVES + "3,preempted\n"),
        read,
        "give fewer with --nodes, or a shorter time with --days",
        lambda lab, found: lab.settings["options"].update(days=0.01),
    ),
    case(
        ROOM + "outages.py: there is no outage of system …",
        give(OUTAGES + "1,2,1/1/2024 1:00,1/1/2024 2:00\n", system="3"),
        read,
        r"name one of (\d+)",
        option("system"),
    ),
    of(
        "counts.py: this is not JSON with 'data' and 'metadata.gap_seconds'",
        '{"data": [3]}',
        r"write \{.*\}",
        '{"metadata": {"gap_seconds": 300}, "data": [4, 4, 3]}',
    ),
    of(
        "counts.py: gap_seconds is …, data has … ticks",
        '{"metadata": {"gap_seconds": 300}, "data": []}',
        "give a positive gap_seconds and at least one tick",
        '{"metadata": {"gap_seconds": 300}, "data": [4]}',
    ),
    of(
        "levels.py: no row of this table can be used",
        CARBON + "2022-01-01 00:00:00+00:00,,\n",
        "give rows with values; .*",
        CARBON + "2022-01-01 00:00:00+00:00,30,40\n",
    ),
    case(
        (
            ROOM + "advisor.py: this table ranks regions and has no time; there is no region …",
            ROOM + "advisor.py: … has no type …",
        ),
        give(ADVISOR),
        read,
        "choose with --zone one of: (.*)",
        option("zone"),
        ("choose with --gpu one of: (.*)", option("gpu")),
    ),
    case(
        ROOM + "advisor.py: this is no table of buckets",
        give(ADVISOR.replace("2", "9"), zone="r1", gpu="big"),
        read,
        r'write \{"spot_advisor": .*',
        good(ADVISOR, zone="r1", gpu="big"),
    ),
    case(
        ROOM + "jitter.py: reading Parquet needs pyarrow",
        give(parquet()),
        perhaps_without_pyarrow,
        r"pip install 'holdfast\[data\]'",
        fixed(installed=True),
    ),
    of(
        "jitter.py: start_ts is …, duration …",
        parquet(duration=[-1.0]),
        "write seconds, 0 or more",
        parquet(),
    ),
    of(
        "jitter.py: stage is …, rank …, step …, optype …",
        parquet(rank=[None]),
        "write numbers, and the operation as text such as forward-compute",
        parquet(),
    ),
    of(
        "jitter.py: there is no column … in this Parquet file",
        without_a_column(),
        "give columns dp_rank, .*",
        parquet(),
    ),
    of(
        "jitter.py: this is no Parquet file that can be read: …",
        parquet()[:-20],
        "fetch it again",
        parquet(),
    ),
    of(
        "jitter.py: the times of the steps do not fit together",
        '{"step_t_nodelay": {"1": 2.1}, "step_t_noblk": {}}',
        r"write \{.*\}",
        '{"step_t_nodelay": {"1": 2.1}, "step_t_noblk": {"1": 1.8}}',
    ),
    of(
        "stream_file.py: … is no JSON object",
        HEADER + "[]\n",
        r"write one object a line, .*",
        HEADER + '{"t_s": 0, "kind": "join", "node": "a", "value": 1}\n',
    ),
    of(
        "stream_file.py: … is … | there is no …",
        HEADER + '{"t_s": "x", "kind": "join"}\n',
        r"see docs/traces\.md for the keys and their values",
        HEADER + '{"t_s": 0, "kind": "join", "node": "a"}\n',
    ),
    of(
        "events.py: (check_events)",
        HEADER + '{"t_s": 0, "kind": "preempt", "node": "a"}\n',
        "write a join of a before it, or drop it",
        HEADER + '{"t_s": 0, "kind": "join", "node": "a"}\n'
        '{"t_s": 1, "kind": "preempt", "node": "a"}\n',
    ),
    case(
        ROOM + "events.py: … at … s stands after a later event",
        lambda lab: lab.settings.update(events=[LATE, EARLY]),
        check,
        "sort the events with `holdfast trace convert FILE --to FILE`",
        lambda lab, found: lab.settings.update(events=in_order(lab.settings["events"])),
    ),
    case(
        "holdfast_lab/traces/generators.py: no generator makes traces of this kind",
        give("src,dest,cost\na,b,0.02\n"),
        lambda lab: fit_trace(read(lab)),
        "give a trace in which nodes are lost, or prices or intensities change",
        good("0,4\n60000,3\n120000,1\n"),
    ),
    case(
        "holdfast_lab/traces/generators.py: … has no parameter …",
        lambda lab: lab.settings.update(given={"machines": 3.0}),
        lambda lab: make_trace("spot", 0, 0.1, lab.settings["given"]),
        r"use one of: (\w+), .*",
        lambda lab, found: lab.settings.update(given={found[1]: 3.0}),
    ),
    case(
        ROOM + "rows.py: there are … cells for … columns",
        give("src,dest,cost\na,b,0,02\n"),
        read,
        "give as many cells as the header has; quote a cell that has a comma",
        good("src,dest,cost\na,b,0.02\n"),
    ),
    case(
        "holdfast_lab/traces/generators.py: no size of a burst has a weight",
        lambda lab: lab.settings.update(given={f"size_{k}": 0.0 for k in range(1, 7)}),
        lambda lab: make_trace("spot", 0, 0.1, lab.settings["given"]),
        r"give one of them 0.001 or more: (\w+)=1",
        lambda lab, found: lab.settings["given"].update({found[1]: 1.0}),
    ),
    case(
        "holdfast_lab/traces/generators.py: … cannot be made with …=…",
        lambda lab: lab.settings.update(given={"nodes": 2.5}),
        lambda lab: make_trace("spot", 0, 0.1, lab.settings["given"]),
        r"give a whole number from (\d+) to \S+",
        lambda lab, found: lab.settings.update(given={"nodes": float(found[1])}),
    ),
    case(
        "holdfast_lab/commands/trace_make.py: … is no parameter",
        lambda lab: lab.settings.update(words=["nodes"]),
        lambda lab: parameters_of(lab.settings["words"]),
        "write key=number, such as --set (nodes=32)",
        lambda lab, found: lab.settings.update(words=[found[1]]),
    ),
    case(
        "holdfast_lab/commands/trace_make.py: nothing of this trace changes over time",
        give("src,dest,cost\na,b,0.02\n"),
        lambda lab: lines_of(read(lab)),
        "give a trace of nodes, prices or intensities",
        good("0,4\n60000,3\n"),
    ),
    case(
        "holdfast_lab/commands/trace.py: the file cannot be read: …",
        lambda lab: None,
        convert,
        "give the path of a file that you can read",
        lambda lab, found: small(lab),
    ),
    case(
        "holdfast_lab/commands/trace.py: the file cannot be written: …",
        lambda lab: lab.settings.update(to="none/b.jsonl"),
        lambda lab: command.write_text("", Path(lab.path(lab.settings["to"])), "--to"),
        "give a path in a folder that exists and that you can write to",
        fixed(to="b.jsonl"),
    ),
    case(
        "show/output.py: this is the file that is read",
        lambda lab: (small(lab), lab.settings.update(to="a.csv")),
        convert,
        "give another path",
        fixed(to="b.jsonl"),
    ),
    case(
        "holdfast_lab/commands/trace.py: the numbers of files (…) and of zones (…) differ",
        lambda lab: (small(lab), lab.settings.update(zones=["x", "y"])),
        convert,
        "give one zone for each file, in their order",
        fixed(zones=["x"]),
    ),
]
