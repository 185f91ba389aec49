"""Options and arguments that several commands have."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.dispatch import expand_argument
from holdfast.errors import ConfigError

Fresh = Annotated[bool, typer.Option("--fresh", help="start over; the old folder is moved aside")]
Yes = Annotated[
    bool, typer.Option("--yes", help="do not ask, whatever the run costs (plan.ask_above_usd)")
]
JournalJson = Annotated[
    bool, typer.Option("--json", help="print the journal as JSON lines instead of a view")
]

Json = Annotated[bool, typer.Option("--json", help="print JSON")]
RunFile = Annotated[Path, typer.Argument(help="the run file")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key=value ...")]


def refuse_beside(what: str, given: Mapping[str, object]) -> None:
    """Raises ConfigError for an option that is set next to `what`, which it has no effect with."""
    for option, value in given.items():
        if value:
            raise ConfigError(
                f"{option} has no effect with {what}",
                where="command line",
                remedy="leave one of the two out",
            )


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
        help="run folder or bucket, or the run file it was started with; "
        "key=value may follow a run file",
        parser=run_path,
    ),
]

Temperature = Annotated[float, typer.Option(help="0: always the likeliest token")]
TopP = Annotated[float, typer.Option(help="nucleus sampling; 1: no limit")]
CheckpointStep = Annotated[
    int | None, typer.Option(help="step of the checkpoint; the newest if left out")
]
LoraBase = Annotated[
    Path | None, typer.Option(help="folder of a lora run's frozen weights, if it has moved")
]
