"""`holdfast trace timeline`: all ranks of a run on one clock, for a viewer of traces."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.options import Json, RunArgument
from holdfast.errors import DataError
from holdfast.launch.run.runs import open_run
from holdfast.report.formatting import format_count, format_plural
from holdfast.report.page.page import write_result
from holdfast.report.timelines.timeline import build_timeline
from holdfast.show.output import print_json, say
from holdfast.wire.journal import read_journal

To = Annotated[Path, typer.Option(help="file to write, for Perfetto, speedscope or Chrome")]


def timeline(run: RunArgument, to: To, json: Json = False) -> None:
    """Write the steps of all ranks on one clock.

    The file has their traced steps and the journal, for a viewer of traces.

    A run traces the steps of layout.trace_step and layout.trace_every. The clocks of nodes are
    aligned by votes, which end everywhere at once. A rank whose clock cannot be aligned is left
    out, with its name and the reason.

    \b
    Example:
      holdfast trace timeline runs/quickstart --to timeline.json
    """
    from json import dumps

    found = open_run(run)
    line = build_timeline(read_journal(found.store))
    if not line.rows:
        raise DataError(
            "no step of this run was traced",
            where=str(found.folder),
            remedy="train on with layout.trace_every=N, for a timeline of every N-th step",
        )
    write_result(to, dumps(line.to_chrome()), "timeline", "--to")
    clocks = line.alignment.clocks
    spans = sum(map(len, line.rows.values()))
    if json:
        nodes = {name: vars(fit) for name, fit in clocks.items()}
        print_json(
            {
                "spans": spans,
                "rows": list(line.rows),
                "clocks": nodes,
                "refused": dict(line.refused),
            }
        )
        return
    worst = max(fit.residual_s for fit in clocks.values())
    said = f"wrote {to}: {format_count(spans)} spans of {format_plural(len(line.rows), 'row')}"
    if len(clocks) > 1:
        said += f"; ends of votes agree to {worst * 1e3:.2f} ms (median) over {len(clocks)} nodes"
    say(said)
    for row, reason in line.refused.items():
        say(f"left out: {row}: {reason}")
    if line.unplaced:
        say(f"left out: {format_plural(line.unplaced, 'record')} of agents without a traced step")
