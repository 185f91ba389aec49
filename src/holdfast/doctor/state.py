"""The state of a run: its last step, its checkpoints, its data. Part of `holdfast doctor RUN`.

Ages compare the time in the journal, which an agent wrote, with the clock of this machine.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.checkpoint.restore.catalog import list_commits
from holdfast.checkpoint.restore.verify import open_commit
from holdfast.config.run import RunConfig
from holdfast.core.format.manifest import Commit
from holdfast.core.sharding.run_table import run_state_table
from holdfast.doctor.checks import Check, CheckState
from holdfast.errors import START_OVER, DataError, HoldfastError, StoreError
from holdfast.events import (
    CheckpointCommitted,
    CheckpointFailed,
    CheckpointUploaded,
    Event,
    PeerFailed,
    Record,
    SnapshotKept,
    StepDone,
    UploadFailed,
    WorkerReady,
)
from holdfast.launch.run.bucket_run import place_word
from holdfast.launch.run.holder import HolderWatch
from holdfast.launch.run.runs import Run
from holdfast.report.formatting import format_bytes, format_count, format_duration, format_plural
from holdfast.report.history.history import History, build_history
from holdfast.report.history.progress import RunProgress
from holdfast.report.ledger.notices import notice_text
from holdfast.report.ledger.ordering import order_records
from holdfast.wire.journal import read_contents
from holdfast.wire.store.run_location import store_of_run
from holdfast.wire.store.run_store import RunStore

STALLED_AFTER_TIMEOUTS = 2
"""Without a step for so many `cluster.progress_seconds`, a run that trains is stalled: as
`/healthz` has it."""

ENDED_STATES = ("finished", "stopped", "failed")
MAX_NAMED_RANKS = 8
MAX_OPENED = 5  # Newest checkpoints whose commit object and heads are read


@dataclass(frozen=True)
class RunState:
    """What the run folder tells.

    lives: a trainer is at work. last_step_age_s: None before a step. next_checkpoint_bytes: room
    that the next checkpoint takes; 0 if that is not known.
    """

    lives: bool
    history: History
    last_step_age_s: float | None
    checkpoint_step: int
    checkpoint_age_s: float | None
    next_checkpoint_bytes: int
    checks: list[Check]
    losses: Mapping[str, tuple[float, str]] = field(default_factory=dict)
    """Nodes that were lost and are not back -> when, in seconds since 1970, and why."""

    def to_json(self) -> dict[str, Any]:
        return {
            "state": self.history.state,
            "lives": self.lives,
            "step": self.history.last_step,
            "step_age_seconds": self.last_step_age_s,
            "checkpoint_step": self.checkpoint_step,
            "checkpoint_age_seconds": self.checkpoint_age_s,
            "next_checkpoint_bytes": self.next_checkpoint_bytes,
        }


def read_state(folder: Path, config: RunConfig | None, watch: HolderWatch, lives: bool) -> RunState:
    """Read the state of a run.

    Args:
        config: None if it cannot be read.
        watch: of the run's holder; it has looked.
        lives: the verdict of that watch.
    """
    store, now = store_of_run(folder), time.time()
    contents = read_contents(store)
    history = build_history(contents.records)
    if history.state == "running" and not lives:
        history = history.as_interrupted()
    steps = [record.time for record in contents.records if isinstance(record.event, StepDone)]
    step_age = max(0.0, now - max(steps)) if steps else None
    newest, checkpoints = _check_checkpoints(store, history, place_word(folder))
    ages = [
        now - record.time
        for record in contents.records
        if newest is not None
        and isinstance(record.event, CheckpointCommitted)
        and record.event.key == newest.key
    ]
    age = max(0.0, ages[-1]) if ages else None
    size = newest.nbytes if newest is not None else _state_bytes(config)
    checks = [
        _run_check(history, watch, lives, folder),
        _step_check(history, config, lives, step_age),
        _age_check(newest, age, history, lives),
        *checkpoints,
        *check_devices(contents.records),
    ]
    if contents.unreadable:
        remedy = "training does not need it; reports and the audit lack what it held"
        found, first = contents.unreadable_sentence(), contents.unreadable[0]
        checks.append(Check("journal", "weak", found, remedy, first))
    checks += _open_complaints(contents.records, lives)
    step = newest.step if newest is not None else 0
    progress = RunProgress(0)
    for record in order_records(contents.records):
        progress.observe(record)
    return RunState(lives, history, step_age, step, age, size, checks, progress.losses)


def is_at_work(folder: Path, watch: HolderWatch) -> bool:
    """Return True if a trainer lives. A holder that does not answer is watched for signs of life,
    unless the journal's last word is that its session has ended."""
    verdict = watch.look()
    if verdict is not None:
        return verdict
    if build_history(read_contents(store_of_run(folder)).records).state in ENDED_STATES:
        return False
    return watch.wait_for_verdict()


def check_dataset(run: Run, is_finished: bool) -> Check:
    """Check that the run's dataset is where it was."""
    from holdfast.data.stream.dataset_location import open_dataset

    folder, version = run.dataset_location, run.dataset_version
    bad: CheckState = "weak" if is_finished else "fails"
    try:
        dataset = open_dataset(folder, run.config.data, ask=True)
    except (DataError, StoreError) as error:
        remedy = error.remedy or "put it back, or name its folder with data.folder=<path>"
        return Check("dataset", bad, error.message, remedy, error.where or folder)
    if version and not dataset.is_version(version):
        found = f"this is {dataset.version}, and the run trains on {version}"
        return Check("dataset", bad, found, "name its folder with data.folder=<path>", folder)
    return Check("dataset", "good", f"{dataset.version} in {dataset.place}")


# --- the run ---------------------------------------------------------------------------------
def _run_check(history: History, watch: HolderWatch, lives: bool, folder: Path) -> Check:
    step = f"after step {format_count(history.last_step)}" if history.last_step else "before a step"
    reason = history.sessions[-1].reason if history.sessions else ""
    if lives:
        return Check("run", "good", f"a trainer is at work: {watch.describe_holder()}")
    if history.state == "empty":
        return Check(
            "run", "weak", "no trainer has begun it", "start it with: holdfast train RUN_FILE"
        )
    if history.state == "finished":
        return Check("run", "good", f"finished {step}")
    again = "the command that started it resumes it"
    if history.state == "stopped":
        return Check("run", "good", f"stopped {step} ({reason}); {again}")
    if history.state == "failed":
        remedy = f"mend the cause; then {again}"
        return Check("run", "fails", f"failed {step}: {reason}", remedy, str(folder / "logs"))
    found = f"interrupted {step}: its trainer was killed, or its machine was lost"
    return Check("run", "weak", found, again)


def _step_check(
    history: History, config: RunConfig | None, lives: bool, age: float | None
) -> Check:
    if age is None:
        found = "none yet"
        return Check("last step", "good" if lives or history.state == "empty" else "weak", found)
    total = f" of {format_count(config.train.steps)}" if config is not None else ""
    found = f"{format_count(history.last_step)}{total}, {format_duration(age)} ago"
    limit = STALLED_AFTER_TIMEOUTS * config.cluster.progress_seconds if config is not None else 0
    if lives and limit and age > limit:
        remedy = "look into logs/ of the run folder; holdfast watch RUN shows what it waits for"
        return Check("last step", "fails", found, remedy, "cluster.progress_seconds")
    return Check("last step", "good", found)


# --- checkpoints -----------------------------------------------------------------------------
def _check_checkpoints(
    store: RunStore, history: History, place: str
) -> tuple[Commit | None, list[Check]]:
    """Return the newest checkpoint that opens, and a check for each recent one that does not."""
    bad: list[tuple[str, str]] = []
    newest: Commit | None = None
    for number, key in enumerate(list_commits(store)):
        if newest is not None and number >= MAX_OPENED:
            break
        try:
            commit = open_commit(store, key)
            newest = newest or commit
        except HoldfastError as error:
            if key in list_commits(store):  # else a run at work removed it
                bad.append((key, str(error)))
    state: CheckState = "fails" if newest is None else "weak"
    instead = (
        f"no other one is there; {START_OVER}"
        if newest is None
        else f"a start takes step {newest.step}"
    )
    remedy = f"see all of it: holdfast checkpoint verify {place}; {instead}"
    return newest, [Check("checkpoint", state, reason, remedy, key) for key, reason in bad]


def _age_check(newest: Commit | None, age: float | None, history: History, lives: bool) -> Check:
    if newest is None:
        found = "none that can be opened"
        if not history.last_step:
            return Check("last checkpoint", "good", "none yet")
        remedy = (
            "the steps so far are in memory alone: see checkpoint.every_steps"
            if lives
            else "a start begins with step 1"
        )
        return Check("last checkpoint", "weak", found, remedy)
    when = "" if age is None else f", {format_duration(age)} ago"
    behind = history.last_step - newest.step
    since = f"; {format_count(behind)} steps since" if behind > 0 else ""
    found = f"step {format_count(newest.step)}, {format_bytes(newest.nbytes)}{when}{since}"
    return Check("last checkpoint", "good", found, where=newest.key)


def _state_bytes(config: RunConfig | None) -> int:
    """Bytes of a checkpoint that was never made: of all parameters and moments."""
    if config is None:
        return 0
    table = run_state_table(config)
    return sum(row.nbytes for row in table)


# --- the journal -----------------------------------------------------------------------------
def check_devices(records: Sequence[Record]) -> list[Check]:
    """Return what the ranks of the newest generation compute on, and what carries their data."""
    ready = [
        (record.generation, record.event.rank, record.event.device)
        for record in records
        if isinstance(record.event, WorkerReady) and record.event.device
    ]
    newest = max((generation for generation, _, _ in ready), default=0)
    ranks: dict[str, list[int]] = {}
    for rank, device in sorted({(r, d) for generation, r, d in ready if generation == newest}):
        ranks.setdefault(device, []).append(rank)
    return [
        Check("devices", "good", f"{_name_ranks(each)}: {device}") for device, each in ranks.items()
    ]


def _name_ranks(ranks: Sequence[int]) -> str:
    if len(ranks) > MAX_NAMED_RANKS:
        return format_plural(len(ranks), "rank")
    return f"rank {', '.join(map(str, ranks))}"


def _open_complaints(records: Sequence[Record], lives: bool) -> list[Check]:
    """Return a check for each kind of save whose last try failed."""
    newest: dict[str, Event] = {}
    for record in records:
        event = record.event
        if isinstance(event, CheckpointCommitted | CheckpointFailed):
            newest["checkpoint"] = event
        elif isinstance(event, CheckpointUploaded | UploadFailed):
            newest["bucket"] = event
        elif isinstance(event, SnapshotKept | PeerFailed):
            newest[f"peer {event.peer}"] = event
    remedy = "it is tried again" if lives else "the next start tries again"
    return [
        Check(f"last save ({name})", "weak", notice_text(event), remedy)
        for name, event in newest.items()
        if isinstance(event, CheckpointFailed | UploadFailed | PeerFailed)
    ]
