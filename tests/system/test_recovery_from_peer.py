"""Tier 1 from outside: a node's memory or the run folder is lost, and a staging machine has all.

The run saves durably only at its end and keeps a snapshot of every step on the staging machine.
Without that machine it would begin again at step 0.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from holdfast.core.data.lineage import split_effective
from holdfast.elastic.protocol.fault_orders import FaultOrders
from holdfast.events import (
    CheckpointRestored,
    GenerationStarted,
    RunFinished,
    SnapshotKept,
    StepDone,
)
from holdfast.wire.journal import read_journal
from holdfast.wire.store.run_store import FolderStore
from tests.support.checkpoints import newest_tensors
from tests.support.commands import apart, peer_settings, secret_file, start, write_run_file
from tests.support.followed_run import FollowedRun
from tests.support.processes import children_of

STEPS, GATE = 60, 25  # no worker passes the gate before a folder is lost
KILL_AT = 10
VARIABLE = "HOLDFAST_SECRET_FILE"
SETTINGS = (f"train.steps={STEPS}", "train.evaluate.every=0", "cluster.threads_per_worker=1")


@pytest.fixture
def command(tmp_path: Path, stage: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str | Path, ...]:
    """A run with the staging machine; an undisturbed one of a worker is in the folder `alone`."""
    monkeypatch.setenv(VARIABLE, str(secret_file(tmp_path)))
    found = ("train", write_run_file(tmp_path), *SETTINGS, *peer_settings(stage))
    alone = (f"folder={tmp_path / 'alone'}", "layout.workers=1", "checkpoint.peers=[]")
    apart(*found, *alone, deadline=200).succeeds()
    return *found, f"folder={tmp_path / 'lost'}"


def _until_kept(folder: Path, process: subprocess.Popen[str]) -> FollowedRun:
    """Follow the run until the staging machine holds a step from KILL_AT on."""
    run = FollowedRun(folder, process)
    run.until(lambda r: isinstance(r.event, SnapshotKept) and r.event.step >= KILL_AT)
    return run


def _came_from_peer(folder: Path) -> list[GenerationStarted]:
    """The generations of a run that finished, all of whose restores read the staging machine."""
    events = [record.event for record in read_journal(FolderStore(folder))]
    restored = [event for event in events if isinstance(event, CheckpointRestored)]
    assert restored
    assert all(event.sources.get("peer stage", 0) > 0 for event in restored)
    assert sum(isinstance(event, RunFinished) for event in events) == 1
    return [event for event in events if isinstance(event, GenerationStarted)]


def _losses(folder: Path) -> dict[int, float]:
    effective, _ = split_effective(read_journal(FolderStore(folder)))
    return {r.event.step: r.event.loss for r in effective if isinstance(r.event, StepDone)}


@pytest.mark.slow
def test_a_run_whose_mover_is_killed_goes_on_from_the_staging_machine(
    tmp_path: Path, command: tuple[str | Path, ...]
) -> None:
    """The mover is killed, and all of its memory with it. So are the workers."""
    lost = tmp_path / "lost"
    run = _until_kept(lost, start(*command, "layout.workers=2", "cluster.recovery=restart"))
    (mover,) = children_of(run.process.pid, "holdfast.checkpoint.mover.main", recursive=True)
    mover.kill()  # the agent ends the other worker
    os.kill(run.pids[0], signal.SIGKILL)
    run.finish()
    _, second = _came_from_peer(lost)
    assert second.reason == "worker_lost"
    assert second.step >= KILL_AT
    assert newest_tensors(tmp_path / "alone", STEPS) == newest_tensors(lost, STEPS)


@pytest.mark.slow
def test_a_lost_run_folder_goes_on_from_the_staging_machine(
    tmp_path: Path, command: tuple[str | Path, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All processes are killed and the folder is removed. The same command then begins a new folder
    above the generations that the peer knows, from the step that the peer holds."""
    gate, lost = FaultOrders(tmp_path / "gate"), tmp_path / "lost"
    gate.prepare()
    command = (*command, "layout.workers=1", f"cluster.faults={gate.folder}")
    gate.open_gate(GATE)
    run = _until_kept(lost, start(*command))
    children = psutil.Process(run.process.pid).children(recursive=True)
    for process in (run.process, *children):
        process.kill()
    run.end()
    _, alive = psutil.wait_procs(children, timeout=120)
    assert not alive
    shutil.rmtree(lost)
    gate.open_gate(STEPS)

    # The secret of the run is not that of a new folder: said, rather than begun from nothing.
    with monkeypatch.context() as without:
        without.delenv(VARIABLE)
        apart(*command).refuses_last("checkpoint.peers, stage", "does not accept", "--fresh")
    shutil.rmtree(lost)

    again = apart(*command, deadline=200).succeeds()
    assert "stage knows this run up to generation 1" in again.out + again.err
    (begun,) = _came_from_peer(lost)
    assert begun.topology["generation"] == 2
    assert KILL_AT <= begun.step <= GATE
    losses, whole = _losses(lost), _losses(tmp_path / "alone")
    assert sorted(losses) == list(range(begun.step + 1, STEPS + 1))
    assert losses == {step: whole[step] for step in losses}
