"""`holdfast audit`: recompute steps of a run, and keep the signed record of its model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdfast.api.progress import StageProgress
from holdfast.api.replay import replay_steps
from holdfast.cli.dispatch import app as make_app
from holdfast.cli.options import Json, RunArgument
from holdfast.cli.read_errors import explain_read_errors
from holdfast.launch.run.runs import open_run
from holdfast.show.output import print_json, print_table

app = make_app("Recompute steps of a run, and keep the signed record of its model.")


@app.callback()
def audit() -> None:
    """Keep `replay` a word of its own."""


@app.command()
def replay(
    run: RunArgument,
    step: Annotated[list[int], typer.Option("--step", min=1, help="step; may be repeated")],
    data: Annotated[
        Path | None, typer.Option("--data", help="folder of the prepared data, if it has moved")
    ] = None,
    within: Annotated[
        float | None,
        typer.Option(help="bound of the relative distance where bits need not be equal", min=0.0),
    ] = None,
    json: Json = False,
) -> int:
    """Compute steps of a run again, and compare them with its public record.

    A pass begins from the newest checkpoint before a step, or from initial weights. It computes up
    to the next recorded weights: a digest of train.digest_every, or a checkpoint. On the way it
    compares the ledger, loss, norm and rate of each step. On like processors all bits must be
    equal. Elsewhere the distance is printed, and a bound judges it. Exit code 1 if something
    differs; the first difference names its step.

    \b
    Example:
      holdfast audit replay runs/quickstart --step 137
      holdfast audit replay copied/quickstart --data copied/dataset --step 12 --step 40
    """
    found = open_run(run)
    with explain_read_errors(found.place), StageProgress() as progress:
        where = None if data is None else str(data)
        result = replay_steps(found, step, dataset=where, bound=within, on_progress=progress.show)
    if json:
        print_json(result.to_json())
        return 0 if result.ok else 1
    print_table(
        [
            (s.step, f"{s.start} to {s.end}", s.compared_with, s.recorded[:16], s.replayed[:16])
            for s in result.steps
        ],
        head=("step", "computed", "compared with", "recorded", "computed here"),
    )
    print(f"\n{result.describe()}")
    for problem in result.problems:
        print(f"  {problem.kind}: {problem.message}")
    for reason in result.unlike:
        print(f"  (bits need not be equal: {reason})")
    return 0 if result.ok else 1
