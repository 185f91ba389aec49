"""`holdfast down`: give the machines of a launched run back to their owner."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.dispatch import app as make_app
from holdfast.cli.options import RunArgument
from holdfast.errors import HoldfastError, StoreError
from holdfast.launch.owners.owner import ENDED, NodeState, OwnedJob, open_owner
from holdfast.launch.run.bucket_run import place_word
from holdfast.launch.run.launch_claim import release_claim
from holdfast.launch.run.runs import folder_with_job, open_run
from holdfast.report.history.history import read_history
from holdfast.show.output import say

WAIT_INTERVAL_S = 0.5


def _what_follows(folder: Path) -> str:
    """Say what the same launch does with a run as it is now."""
    with suppress(HoldfastError):
        if read_history(open_run(folder).store).state == "finished":
            return "the run is finished"
    return "the same 'holdfast launch' again resumes the run"


app = make_app("Give the machines of a launched run back.")


@app.command()
def down(
    run: RunArgument,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="return once all nodes have left")
    ] = True,
) -> int:
    """End the nodes of a run that 'holdfast launch' started. The run saves and can be resumed.

    \b
    Example:
      holdfast down runs/my-run
    """
    folder = folder_with_job(run)
    job = OwnedJob.read(folder)
    owner = open_owner(job.owner)
    replace(job, released=True).write(folder)  # first: the agents read why they are to leave
    try:
        owner.release(job)
    except HoldfastError:
        job.write(folder)
        raise
    if wait:
        before: list[str] = []
        while left := [each.node for each in owner.status(job) if each.is_live]:
            if left != before:
                say(f"leaving: {', '.join(left)}")
                before = left
            time.sleep(WAIT_INTERVAL_S)
        for each in owner.status(job):
            if each.state is NodeState.LOST and each.detail != ENDED:
                say(f"node {each.node} is lost, and its agent may still be at work ({each.detail})")
        with suppress(StoreError):  # a claim on a bucket that is away ends by its age
            release_claim(folder)
        say(f"no node of job {job.job} is left; {_what_follows(folder)}")
    else:
        place = place_word(folder)
        say(f"{job.owner} ends the nodes of job {job.job}; see them with: holdfast status {place}")
    return 0
