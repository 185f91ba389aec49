"""`holdfast down`: give the machines of a launched run back to their owner."""

from __future__ import annotations

from holdfast.cli.dispatch import app as make_app
from holdfast.cli.options import RunArgument
from holdfast.cli.output import say
from holdfast.launch.runs import open_run

app = make_app("Give the machines of a launched run back.")


@app.command()
def down(
    run: RunArgument,
) -> int:
    """End the nodes of a run that 'holdfast launch' started. The run saves and can be resumed.

    \b
    Example:
      holdfast down runs/my-run
    """
    from holdfast.launch.owner import OwnedJob
    from holdfast.launch.owners.choose import open_owner

    found = open_run(run)
    job = OwnedJob.read(found.folder)
    open_owner(job.owner).release(job)
    say(f"{job.owner} ends the nodes of job {job.job}; resume with: holdfast launch {run}")
    return 0
