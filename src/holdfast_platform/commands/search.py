"""`holdfast search`: tries values of a run file's keys, with Optuna."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.dispatch import app as make_app
from holdfast.cli.options import Json
from holdfast.show.output import print_json, print_table, say
from holdfast_platform.search.file import read_search
from holdfast_platform.search.runner import SearchRunner

app = make_app("Try values of a run file's keys, and name the best.")


@app.command()
def search(
    file: Annotated[Path, typer.Argument(help="the search file")],
    folder: Annotated[
        Path | None, typer.Option(help="of all trials; none: as the file says")
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="run nothing, show the trials")] = False,
    json: Json = False,
) -> int:
    """Run the trials of a search file. The same command continues a search that was cut off.

    Each trial is a run in a folder of its own. A trial that is killed continues from its
    checkpoint. A trial that is pruned keeps its checkpoint, and 'holdfast train' continues it.

    \b
    Example:
      holdfast search search.yaml
      holdfast search search.yaml --show
    """
    runner = SearchRunner(read_search(file, folder and folder.absolute()), say)
    code = 0 if show else runner.run()
    rows = [
        (trial.number, trial.state.value, trial.starts, trial.value, dict(trial.parameters))
        for trial in runner.trials()
    ]
    head = ("trial", "state", "starts", "value", "parameters")
    if json:
        print_json([dict(zip(head, row, strict=True)) for row in rows])
    elif show:
        print_table(rows, head)
    return code
