"""`holdfast status`: the nodes of a launched run as the owner of the machines sees them."""

from __future__ import annotations

from dataclasses import asdict

from holdfast.cli.dispatch import app as make_app
from holdfast.cli.options import Json, RunArgument
from holdfast.launch.owners.owner import OwnedJob, WarningOwner, open_owner
from holdfast.launch.run.runs import folder_with_job
from holdfast.show.output import print_json, print_table, say

app = make_app("Show the nodes of a launched run.")


@app.command()
def status(run: RunArgument, json: Json = False) -> int:
    """Show the nodes of a run that 'holdfast launch' started, as their owner sees them.

    What the run itself does: holdfast watch RUN. Exit code 1 if no node waits or runs.

    \b
    Example:
      holdfast status runs/my-run
    """

    job = OwnedJob.read(folder_with_job(run))
    owner = open_owner(job.owner)
    nodes = owner.status(job)
    warnings = owner.warnings(job) if isinstance(owner, WarningOwner) else []
    if json:
        told = {"owner": job.owner, "job": job.job, "nodes": [asdict(each) for each in nodes]}
        print_json(told | {"warnings": warnings})
    else:
        print_table(
            [(each.node, each.state.value, each.detail) for each in nodes],
            head=("node", "state", f"{job.owner}, job {job.job}"),
        )
        for warning in warnings:
            say(warning)
    return 0 if any(each.is_live for each in nodes) else 1
