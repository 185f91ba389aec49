"""`holdfast status`: how far a run is, and its nodes, as their owner or the journal has them."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli.dispatch import app as make_app
from holdfast.cli.dispatch import folder_with_keys, is_key
from holdfast.cli.options import Json, named_argument
from holdfast.cli.status_table import RunRow, print_runs, runs_json
from holdfast.doctor.state import is_at_work
from holdfast.errors import HoldfastError, UserError
from holdfast.events import CheckpointCommitted
from holdfast.launch.owners.owner import (
    JOB_FILE,
    MachineOwner,
    NodeState,
    NodeStatus,
    OwnedJob,
    WarningOwner,
    open_owner,
)
from holdfast.launch.run.holder import HolderWatch
from holdfast.launch.run.runs import Run, folder_with_job, open_run
from holdfast.report.formatting import format_duration, format_si
from holdfast.report.history.progress import RunProgress
from holdfast.report.ledger.ordering import order_records
from holdfast.show.output import print_json, print_table, say
from holdfast.wire.journal import read_journal

MAX_READ_LOGS = 4  # Logs of failed nodes that are read for a reason

app = make_app("Show the nodes of a run, and how far it is.")


Runs = Annotated[
    list[str],
    typer.Argument(
        metavar="<run> ...",
        help="run folder or bucket, or the run file it was started with; several: a table. "
        "key=value gives keys of the run file",
    ),
]


@app.command()
def status(runs: Runs, json: Json = False) -> int:
    """Show the nodes of a run, and how far it is; of several runs, a table.

    Of a run that 'holdfast launch' started here, the owner of its machines says what each node
    does. Of another run, its journal does. As it happens: holdfast watch RUN. Exit code 1 if no
    node waits or runs.

    \b
    Example:
      holdfast status runs/my-run
      holdfast status runs/a runs/b
    """
    named = [named_argument("run", word) for word in runs if not is_key(word)]
    if keys := [word for word in runs if is_key(word)]:
        named = [folder_with_keys(each, keys) for each in named]
    if len(named) > 1:
        return _show_several(named, json=json)
    if not named:
        raise UserError("no run is named", where="command line", remedy="name its folder or file")
    return _show_one(named[0], json=json)


def _show_several(arguments: list[Path], *, json: bool) -> int:
    rows, works = [], False
    for argument in arguments:
        run = open_run(argument)
        is_live = is_at_work(run.folder, HolderWatch(run.folder, say))
        works |= is_live
        rows.append(RunRow(argument, run, _read_progress(run, argument, None, is_live)[0]))
    if json:
        print_json(runs_json(rows, [_figures(row.progress) for row in rows]))
    else:
        print_runs(rows)
    return 0 if works else 1


def _show_one(run: Path, *, json: bool) -> int:
    folder = folder_with_job(run)
    job = OwnedJob.read(folder) if (folder / JOB_FILE).exists() else None
    nodes: list[NodeStatus] = []
    warnings: list[str] = []
    is_live = False
    if job is not None:
        owner = open_owner(job.owner)
        nodes = owner.status(job)
        warnings = owner.warnings(job) if isinstance(owner, WarningOwner) else []
        is_live = any(each.is_live for each in nodes)
        nodes = [*_with_reasons(owner, job, nodes)]
    try:
        found = open_run(folder)
        is_live = is_live if job is not None else is_at_work(folder, HolderWatch(folder, say))
        progress, line = _read_progress(found, run, job, is_live)
    except HoldfastError as error:
        if job is None:
            raise
        progress, line = None, f"the run itself cannot be read: {error}"
    nodes = _with_places(nodes, progress, job is not None, is_live)
    if json:
        told = {"owner": job and job.owner, "job": job and job.job, "warnings": warnings}
        figures = _figures(progress) if progress else None
        print_json({**told, "nodes": [asdict(each) for each in nodes], "run": figures})
    else:
        is_left = progress is not None and progress.state != "finished"
        words = {NodeState.FINISHED: "left"} if is_left else {}
        rows = [(each.node, words.get(each.state, each.state.value), each.detail) for each in nodes]
        if job is not None:
            print_table(rows, head=("node", "state", f"{job.owner}, job {job.job}"))
        elif rows:
            print_table(rows, head=("node", "state", "as the journal has it"))
        for warning in warnings:
            say(warning)
        print(line)
    return 0 if is_live else 1


def _with_reasons(
    owner: MachineOwner, job: OwnedJob, nodes: list[NodeStatus]
) -> Iterator[NodeStatus]:
    """Yield the nodes; those that failed with the sentence that they printed last, if any."""
    asked = 0
    for each in nodes:
        if each.state is NodeState.FAILED and asked < MAX_READ_LOGS:
            asked += 1
            with suppress(HoldfastError):  # the logs may be out of reach
                errors = [x for x in owner.logs(job, each.node) if x.startswith("holdfast: ")]
                if errors:
                    yield replace(each, detail=f"{each.detail}; {errors[-1]}")
                    continue
        yield each


def _with_places(
    nodes: list[NodeStatus], progress: RunProgress | None, is_launched: bool, is_live: bool
) -> list[NodeStatus]:
    """Say of each node that is at work and has no place in the run what the run says of it."""
    if progress is None or not is_live:
        return nodes
    if not is_launched:
        nodes = [
            NodeStatus(n, NodeState.RUNNING if there or n in progress.spares else NodeState.LOST)
            for n, there in progress.nodes.items()
        ]
    found = []
    for each in nodes:
        words = [each.detail] if each.detail else []
        if each.node in progress.spares:
            words.append("waits as a spare")
        elif each.node in progress.losses and not progress.nodes.get(each.node, True):
            words.append(f"the run has lost it: {progress.losses[each.node][1]}")
        is_open = each.state in (NodeState.RUNNING, NodeState.LOST)
        found.append(replace(each, detail="; ".join(words)) if is_open else each)
    return found


def _read_progress(
    run: Run, argument: Path, job: OwnedJob | None, is_live: bool
) -> tuple[RunProgress, str]:
    """Return how far a run is, and a line that says so. job: None if no launch began it. Raises
    HoldfastError."""
    progress, committed_at = RunProgress(run.config.train.steps), 0.0
    for record in order_records(read_journal(run.store)):
        progress.observe(record)
        if isinstance(record.event, CheckpointCommitted):
            committed_at = record.time
    now = progress
    if is_live and now.state in ("stopped", "paused", "failed"):
        now.state = "starting again"
    now.state = state = now.state if is_live or now.is_over else "interrupted"
    state += " by the user (holdfast down)" if job and job.released and state == "stopped" else ""
    parts = [f"{state} at step {now.step:,} of {now.total_steps:,}", f"loss {now.loss:.4f}"]
    if is_live and state != "starting again":
        parts += [f"{format_si(now.tokens_per_second)} {now.unit}/s"]
        parts += [] if now.eta_s is None else [f"{format_duration(now.eta_s)} left"]
    if not now.step:
        parts = [f"{state}: before the first step of {now.total_steps:,}"]
    if now.checkpoint is not None:
        age = format_duration(max(0.0, time.time() - committed_at))
        parts.append(f"last checkpoint: step {now.checkpoint[0].step:,}, {age} ago")
    line = ", ".join(parts)
    if run.is_simulated:
        return now, f"simulated, nothing was trained: {parts[0]}"
    if is_live or now.state == "finished":
        return now, line
    places = (o["place"] for o in run.resolved["origins"].values() if o["kind"] == "file")
    file = str(argument) if argument.is_file() else next(places, "RUN_FILE").partition(":")[0]
    words = run.resolved.get("overrides", ())
    by_launch = job is not None or any(word.startswith("launch.on=") for word in words)
    again = shlex.join(["holdfast", "launch" if by_launch else "train", file, *words])
    if state == "paused":
        return now, f"{line}; the command that waits continues it, or, without one: {again}"
    return now, f"{line}; continue with: {again}"


def _figures(progress: RunProgress) -> dict[str, Any]:
    figures = {n: getattr(progress, n) for n in ("state", "step", "total_steps", "loss", "eta_s")}
    checkpoint = progress.checkpoint[0].step if progress.checkpoint else None
    more = {"tokens_per_second": progress.tokens_per_second, "checkpoint_step": checkpoint}
    return figures | ({} if progress.step else {"loss": None}) | more
