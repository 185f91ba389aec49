"""`holdfast branch`: a new run that continues another one from a checkpoint."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from holdfast.api.progress import StageProgress
from holdfast.cli.dispatch import app as make_app
from holdfast.cli.options import Json, RunArgument
from holdfast.cli.read_errors import explain_read_errors
from holdfast.launch.run.branch import make_branch
from holdfast.launch.run.runs import open_run
from holdfast.launch.start.regions import refuse_copy_elsewhere
from holdfast.report.formatting import format_bytes
from holdfast.show.output import print_json, say

app = make_app("Begin a new run from a checkpoint of another one.")


@app.command()
def branch(
    run: RunArgument,
    to: Annotated[Path, typer.Option("--to", help="the new run folder; it must not exist")],
    at: Annotated[
        str, typer.Option("--at", help="the step to continue from: a number, or newest")
    ] = "newest",
    overrides: Annotated[
        list[str] | None, typer.Argument(help="keys with another value: key=value ...")
    ] = None,
    json: Json = False,
) -> None:
    """Make a new run that continues another one from the state after a step.

    Weights, optimizer state and position in the data are those of the checkpoint, and every byte
    of it is checked. The keys that you name have other values from the next step on, such as the
    learning rate. Without any, the branch computes what the run computes, bit for bit. If the files
    of a task have changed, the branch takes the new ones, and says so.

    The run stays as it is, and may be training. The step needs a checkpoint in the run folder or
    in checkpoint.bucket; 'holdfast checkpoint list RUN' shows those of the folder. The new folder
    has a run file of its own, which 'holdfast train' starts. 'holdfast report' and 'holdfast data
    audit' of the branch know which steps the parent did.

    The table in docs/reference/run-file.md says which keys can change in a branch. Keys of the
    model and of the data cannot: no checkpoint fits another value. A branch that is cut short is no
    run folder; the same command resumes it.

    \b
    Example:
      holdfast branch runs/quickstart --at 100 --to runs/slow train.optimizer.learning_rate=1e-4
      holdfast train runs/slow/run.yaml

    \b
    Another size of the batch, for the steps after 100:
      holdfast branch runs/quickstart --at 100 --to runs/large \\
        'train.batch_warmup=[{from_step: 101, batch_size: 64}]'
    """
    from holdfast.machine.hardware import detect_hardware

    parent = open_run(run)
    refuse_copy_elsewhere(parent.config.governance, str(to), "--to")
    with explain_read_errors(parent.place), StageProgress() as progress:
        show = partial(progress.show_bytes, "copied")
        made = make_branch(parent, at, to, overrides or [], detect_hardware(), show)
    command = shlex.join(["holdfast", "train", str(made.run_file)])
    size = made.copied.copied_bytes + made.copied.present_bytes
    if json:
        about = {"branch": str(made.folder), "bytes": size, "train": command}
        print_json({**made.event.body, **about})
        return
    changes = f" with {', '.join(made.event.changed)}" if made.event.changed else ""
    say(
        f"{made.folder} continues {parent.place} after step {made.event.step}{changes} "
        f"({format_bytes(size)} copied and checked); train it: {command}"
    )
