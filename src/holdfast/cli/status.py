"""`holdfast status`: the nodes of a launched run as their owner sees them, and how far it is."""

from __future__ import annotations

import shlex
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from holdfast.cli.dispatch import app as make_app
from holdfast.cli.options import Json, RunArgument
from holdfast.errors import HoldfastError
from holdfast.events import CheckpointCommitted
from holdfast.launch.owners.owner import NodeState, OwnedJob, WarningOwner, open_owner
from holdfast.launch.run.runs import Run, folder_with_job, open_run
from holdfast.report.formatting import format_duration, format_si
from holdfast.report.history.progress import RunProgress
from holdfast.show.output import print_json, print_table, say
from holdfast.wire.journal import read_journal

app = make_app("Show the nodes of a launched run.")


@app.command()
def status(run: RunArgument, json: Json = False) -> int:
    """Show the nodes of a run that 'holdfast launch' started, and how far the run is.

    As it happens: holdfast watch RUN. Exit code 1 if no node waits or runs.

    \b
    Example:
      holdfast status runs/my-run
    """
    folder = folder_with_job(run)
    job = OwnedJob.read(folder)
    owner = open_owner(job.owner)
    nodes = owner.status(job)
    warnings = owner.warnings(job) if isinstance(owner, WarningOwner) else []
    is_live = any(each.is_live for each in nodes)
    try:
        progress, line = _read_progress(open_run(folder), run, is_live)
    except HoldfastError as error:
        progress, line = None, f"the run itself cannot be read: {error}"
    if json:
        told = {"owner": job.owner, "job": job.job, "nodes": [asdict(each) for each in nodes]}
        print_json(told | {"warnings": warnings, "run": _figures(progress) if progress else None})
    else:
        is_left = progress is not None and progress.state != "finished"
        words = {NodeState.FINISHED: "left"} if is_left else {}
        print_table(
            [(each.node, words.get(each.state, each.state.value), each.detail) for each in nodes],
            head=("node", "state", f"{job.owner}, job {job.job}"),
        )
        for warning in warnings:
            say(warning)
        print(line)
    return 0 if is_live else 1


def _read_progress(run: Run, argument: Path, is_live: bool) -> tuple[RunProgress, str]:
    """Return how far a run is, and a line that says so. Raises HoldfastError."""
    progress, committed_at = RunProgress(run.config.train.steps), 0.0
    for record in read_journal(run.store):
        progress.observe(record)
        if isinstance(record.event, CheckpointCommitted):
            committed_at = record.time
    now = progress
    now.state = state = now.state if is_live or now.is_over else "interrupted"
    parts = [f"{state} at step {now.step:,} of {now.total_steps:,}", f"loss {now.loss:.4f}"]
    if is_live:
        parts += [f"{format_si(now.tokens_per_second)} {now.unit}/s"]
        parts += [] if now.eta_s is None else [f"{format_duration(now.eta_s)} left"]
    if not now.step:
        parts = [f"{state}: before the first step of {now.total_steps:,}"]
    if now.checkpoint is not None:
        age = format_duration(max(0.0, time.time() - committed_at))
        parts.append(f"last checkpoint: step {now.checkpoint[0].step:,}, {age} ago")
    line = ", ".join(parts)
    if is_live or now.state == "finished":
        return now, line
    places = (o["place"] for o in run.resolved["origins"].values() if o["kind"] == "file")
    file = str(argument) if argument.is_file() else next(places, "RUN_FILE").partition(":")[0]
    again = shlex.join(["holdfast", "launch", file, *run.resolved.get("overrides", ())])
    return now, f"{line}; continue with: {again}"


def _figures(progress: RunProgress) -> dict[str, Any]:
    figures = {n: getattr(progress, n) for n in ("state", "step", "total_steps", "loss", "eta_s")}
    checkpoint = progress.checkpoint[0].step if progress.checkpoint else None
    more = {"tokens_per_second": progress.tokens_per_second, "checkpoint_step": checkpoint}
    return figures | ({} if progress.step else {"loss": None}) | more
