"""`holdfast checkpoint`: what a run could go on from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.call import app as make_app
from holdfast.cli.output import print_json, print_table, say
from holdfast.cli.runs import open_run
from holdfast.report.numbers import size

app = make_app("List, verify and import checkpoints.")

RunArgument = Annotated[
    Path, typer.Argument(help="run folder, or the run file it was started with")
]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]


@app.command("list")
def list_(run: RunArgument, json: Json = False) -> None:
    """List the committed checkpoints of a run, newest first.

    \b
    Example:
      holdfast checkpoint list runs/quickstart
    """
    from holdfast.checkpoint.restore import describe, listing
    from holdfast.errors import HoldfastError

    found = open_run(run)
    rows, described = [], []
    for key in listing(found.store):
        try:
            row = describe(found.store, key)
        except HoldfastError as error:
            row = {"key": key, "problem": str(error)}
            rows.append(("?", "?", "?", str(error)))
        else:
            rows.append((row["step"], row["generation"], size(row["bytes"]), key))
        described.append(row)
    if json:
        print_json(described)
    elif rows:
        print_table(rows, head=("step", "generation", "size", "commit object"))
    else:
        say(f"{found.folder} has no checkpoint")


@app.command()
def verify(run: RunArgument, json: Json = False) -> int:
    """Check every byte of every checkpoint of a run. Exit code 1 if one is damaged.

    \b
    Example:
      holdfast checkpoint verify runs/quickstart
    """
    from holdfast.checkpoint.restore import listing
    from holdfast.checkpoint.restore import verify as problems_of

    found = open_run(run)
    problems = {key: problems_of(found.store, key) for key in listing(found.store)}
    if json:
        print_json([{"key": key, "problems": value} for key, value in problems.items()])
    else:
        for key, value in problems.items():
            print(f"{key}: {'whole' if not value else '; '.join(value)}")
        if not problems:
            say(f"{found.folder} has no checkpoint")
    return 1 if any(problems.values()) else 0
