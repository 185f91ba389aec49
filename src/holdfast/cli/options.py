"""Options and arguments that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.dispatch import expand_argument

Fresh = Annotated[bool, typer.Option("--fresh", help="start over; the old folder is moved aside")]
Yes = Annotated[
    bool, typer.Option("--yes", help="do not ask, whatever the run costs (plan.ask_above_usd)")
]
JournalJson = Annotated[
    bool, typer.Option("--json", help="print the journal as JSON lines instead of a view")
]


def run_path(text: str | Path) -> Path:
    """Return the path that names a run. For a bucket's address it is that of the run's local
    folder. (As a path, an address would lose a slash.)"""
    if "://" not in str(text):
        return Path(text)
    from holdfast.launch.run.runs import named_path

    return named_path(text)


def named_argument(name: str, text: str) -> Path:
    """Return the path that a text of the command line names, as `run_path`, with `~` filled in."""
    return run_path(text if "://" in text else expand_argument(name, text))


RunArgument = Annotated[
    Path,
    typer.Argument(
        help="run folder or bucket, or the run file it was started with", parser=run_path
    ),
]
