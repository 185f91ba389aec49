"""`holdfast logs`: what the nodes of a launched run have printed."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.cli.dispatch import app as make_app
from holdfast.cli.options import RunArgument
from holdfast.launch.runs import open_run

app = make_app("Print what the nodes of a launched run have printed.")


@app.command()
def logs(
    run: RunArgument,
    node: Annotated[str, typer.Option(help="one node alone; left out: all of them")] = "",
) -> int:
    """Print what the nodes of a run that 'holdfast launch' started have printed so far.

    \b
    Example:
      holdfast logs runs/my-run --node node-0
    """
    from holdfast.launch.owner import OwnedJob
    from holdfast.launch.owners.choose import open_owner

    job = OwnedJob.read(open_run(run).folder)
    for line in open_owner(job.owner).logs(job, node):
        print(line)
    return 0
