"""`holdfast logs`: what the nodes of a launched run have printed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Annotated

import typer

from holdfast.cli.dispatch import app as make_app
from holdfast.cli.options import RunArgument
from holdfast.launch.owners.owner import MachineOwner, OwnedJob, open_owner
from holdfast.launch.run.runs import folder_with_job

FOLLOW_INTERVAL_S = 1.0

app = make_app("Print what the nodes of a launched run have printed.")


@app.command()
def logs(
    run: RunArgument,
    node: Annotated[str, typer.Option(help="one node alone; left out: all of them")] = "",
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="continue until no node is at work")
    ] = False,
) -> int:
    """Print what the nodes of a run that 'holdfast launch' started have printed so far.

    \b
    Example:
      holdfast logs runs/my-run --node node-0
      holdfast logs runs/my-run --follow
    """
    job = OwnedJob.read(folder_with_job(run))
    owner = open_owner(job.owner)
    try:
        for line in _followed(owner, job, node) if follow else owner.logs(job, node):
            print(line, flush=follow)
    except KeyboardInterrupt:
        if not follow:
            raise
    return 0


def _followed(owner: MachineOwner, job: OwnedJob, node: str) -> Iterator[str]:
    """Yield the lines of one node, or of all, until none is at work."""
    read: dict[str, int] = {}
    is_live = True
    while is_live:
        nodes = owner.status(job)  # first: what a node printed last is read after its end
        is_live = any(each.is_live for each in nodes if node in ("", each.node))
        for name in [node] if node else [each.node for each in nodes]:
            for number, line in enumerate(owner.logs(job, name)):
                if number >= read.get(name, 0):
                    read[name] = number + 1
                    yield line if node else f"{name}: {line}"
        if is_live:
            time.sleep(FOLLOW_INTERVAL_S)
