"""`holdfast chaos`: break a run on purpose, and see that it is the same in the end."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli.call import app as make_app
from holdfast.cli.output import say
from holdfast.elastic.faults.campaign import (
    RESULT,
    Campaign,
    Settings,
    Task,
    summary,
    table,
    tasks,
)
from holdfast.elastic.faults.library import FAULTS
from holdfast.elastic.faults.own import OVERRIDES, write_run_file
from holdfast.elastic.faults.schedule import Draw, names_of, read_trace
from holdfast.elastic.faults.shapes import SHAPES, Shape, shape_of
from holdfast.elastic.faults.traces import draws_of
from holdfast.errors import UserError
from holdfast.simulate.traces import load

app = make_app("Break a run on purpose, and see that it comes to the same end.")


@app.command()
def chaos(
    run_file: Annotated[
        Path | None, typer.Argument(help="the run file; left out: a tiny model of its own")
    ] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value ...")] = None,
    seed: Annotated[int, typer.Option(help="draws faults, steps and victims")] = 1,
    faults: Annotated[
        str, typer.Option(help="how many, or which, or both: '30 kill,agent'")
    ] = "25",
    layout: Annotated[
        str, typer.Option(help="by name, several with commas; or degrees such as tp=2,workers=4")
    ] = "replicated",
    nodes: Annotated[
        int, typer.Option(help="agents that share the ranks; 0: as the layout says")
    ] = 0,
    trace: Annotated[
        Path | None, typer.Option(help="a file that says which fault comes when")
    ] = None,
    shard: Annotated[str, typer.Option(help="i/n: the i-th part of all runs, from 1")] = "1/1",
    out: Annotated[Path, typer.Option(help="the folder for everything")] = Path("chaos"),
    network: Annotated[
        bool, typer.Option(help="nodes in network namespaces, where the rights allow")
    ] = True,
    known: Annotated[bool, typer.Option("--list", help="list the faults and leave")] = False,
) -> int:
    """Train on several nodes, break them again and again, and compare with a run left in peace.

    Every node is an agent of its own, started by the real command. A fault happens at a named point
    of a step, which the journal shows, about every third step; what was killed is started again. In
    the end three verdicts are asked for: the same loss at every step, each sample used once, the
    same tensors. Where nodes cannot have networks of their own, partition, delay and loss are left
    out and listed.

    Runs of 25 faults each, one after the other; what is finished in --out is not done again. Exit
    code 0 only if every run recovered.

    \b
    Example:
      holdfast chaos                                        25 faults, replicas, a tiny model
      holdfast chaos run.yaml --layout tp --faults '10 kill,agent' --seed 7
      holdfast chaos --layout replicated,tp,pp --faults 150 --shard 1/2
      holdfast chaos --trace faults.jsonl                   {"step": 12, "fault": "agent"} a line
    """
    if known:
        for fault in FAULTS.values():
            print(f"{fault.name:<18} {fault.text}")
        return 0
    number, names = names_of(faults)
    shapes = _shapes(layout, nodes)
    index, parts = _shard(shard)
    draws = None if trace is None else tuple(_draws(trace, seed, shapes[0].nodes))
    out.mkdir(parents=True, exist_ok=True)
    chosen = write_run_file(out) if run_file is None else run_file
    settings = Settings(
        (sys.executable, "-m", "holdfast.cli.main"), chosen, (*OVERRIDES, *(overrides or ())), out,
        seed, tuple(names), draws, network,
    )  # fmt: skip
    if draws is None:
        work = tasks(shapes, number or 25)
    else:
        last = max(draw.step for draw in draws)
        work = [Task(shape, index, len(draws), last) for index, shape in enumerate(shapes, 1)]
    return _told(Campaign(settings, say).run(work[index - 1 :: parts]), out)


def _shapes(layout: str, nodes: int) -> list[Shape]:
    """Of one name or some degrees, or of several names with commas. Raises UserError."""
    named = [layout] if "=" in layout else layout.split(",")
    shapes = [shape_of(each, nodes) for each in named]
    if any(shape.nodes < 2 for shape in shapes):
        raise UserError("one node has nobody beside it", where="--nodes",
                        remedy=f"use 2 or more, or one of {', '.join(SHAPES)}")  # fmt: skip
    return shapes


def _told(results: list[dict[str, Any]], out: Path) -> int:
    """The table, and result.json; the exit code."""
    found = summary(results)
    (out / RESULT).write_text(json.dumps(found, indent=1))
    print("\n".join(table(results)), flush=True)
    say(f"{sum(r['recovered'] for r in results)} of {len(results)} runs recovered, "
        f"{found['faults']} faults; {out / RESULT}")  # fmt: skip
    return 0 if found["recovered"] else 1


def _draws(trace: Path, seed: int, nodes: int) -> list[Draw]:
    """From a file of faults, or one of machines that come and go (docs/chaos.md).

    Raises UserError for a file that cannot be read, or in which nothing happens."""
    try:
        text = trace.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"this cannot be read ({error})", where=str(trace),
                        remedy="name a file of faults") from None  # fmt: skip
    first = next((line for line in text.splitlines() if line.strip()), "")
    if first.lstrip().startswith('{"step"'):
        draws = read_trace(text, str(trace), str(seed))
    else:
        shares, there = [], 0
        for _, gone, come in load(text, str(trace), seed=seed).instants():
            if gone:
                shares.append(len(gone) / max(1, there))
            there += len(come) - len(gone)
        draws = draws_of(shares, seed, nodes)
    if not draws:
        raise UserError("nothing happens in this trace", where=str(trace),
                        remedy="use another one")  # fmt: skip
    return draws


def _shard(text: str) -> tuple[int, int]:
    index, slash, parts = text.partition("/")
    if not (slash and index.isdigit() and parts.isdigit() and 1 <= int(index) <= int(parts)):
        raise UserError(f"{text!r} is no part of anything", where="--shard", remedy="use 1/2, 2/2")
    return int(index), int(parts)
