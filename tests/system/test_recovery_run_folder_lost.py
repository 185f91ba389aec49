"""A run folder is lost with everything on its node, and the run resumes from a peer's memory.

The run keeps a snapshot of every step on a staging machine and saves durably only at its end. All
of its processes are killed and the folder is removed. The same command then begins a new folder
above the generations that the peer knows, from the step that the peer holds.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from holdfast.elastic.protocol.fault_orders import FaultOrders
from holdfast.events import (
    CheckpointRestored,
    GenerationStarted,
    RunFinished,
    SnapshotKept,
    StepDone,
)
from holdfast.wire.journal import Record, read_journal
from holdfast.wire.store.run_store import FolderStore
from tests.support.commands import apart, peer_settings, secret_file, start, write_run_file
from tests.support.followed_run import FollowedRun

STEPS, GATE = 40, 25  # no worker passes the gate before all is lost
KILL_AT = 10
VARIABLE = "HOLDFAST_SECRET_FILE"


@pytest.mark.slow
def test_a_lost_run_folder_goes_on_from_the_staging_machine(
    tmp_path: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(secret_file(tmp_path)))
    path = write_run_file(tmp_path)
    gate = FaultOrders(tmp_path / "gate")
    gate.prepare()
    settings = (
        f"train.steps={STEPS}",
        "train.evaluate.every=0",
        "layout.workers=1",
        "cluster.threads_per_worker=1",
        f"cluster.faults={gate.folder}",
        *peer_settings(stage),
    )
    lost, alone = tmp_path / "lost", tmp_path / "alone"
    apart(
        "train", path, f"folder={alone}", *settings, "checkpoint.peers=[]", deadline=200
    ).succeeds()

    command = ("train", path, f"folder={lost}", *settings)
    gate.open_gate(GATE)
    _lose(start(*command), lost)
    gate.open_gate(STEPS)

    # The secret of the run is not that of a new folder: said, rather than begun from nothing.
    with monkeypatch.context() as without:
        without.delenv(VARIABLE)
        apart(*command).refuses_last("checkpoint.peers, stage", "does not accept", "--fresh")
    shutil.rmtree(lost)

    again = apart(*command, deadline=200).succeeds()
    assert "stage knows this run up to generation 1" in again.out + again.err
    records = read_journal(FolderStore(lost))
    (begun,) = [r for r in records if isinstance(r.event, GenerationStarted)]
    assert begun.generation == 2
    assert KILL_AT <= begun.event.step <= GATE
    restored = [r.event for r in records if isinstance(r.event, CheckpointRestored)]
    assert restored
    assert all(event.sources.get("peer stage", 0) > 0 for event in restored)
    assert sum(isinstance(r.event, RunFinished) for r in records) == 1
    losses, whole = _losses(records), _losses(read_journal(FolderStore(alone)))
    assert sorted(losses) == list(range(begun.event.step + 1, STEPS + 1))
    assert losses == {step: whole[step] for step in losses}


def _lose(process: subprocess.Popen[str], folder: Path) -> None:
    """Kill all of a run, once the staging machine holds a step from KILL_AT on; its folder goes."""
    run = FollowedRun(folder, process)
    run.until(lambda r: isinstance(r.event, SnapshotKept) and r.event.step >= KILL_AT)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    for child in children:
        if child.is_running():
            child.kill()
    run.end()
    _, alive = psutil.wait_procs(children, timeout=120)
    assert not alive
    shutil.rmtree(folder)


def _losses(records: list[Record]) -> dict[int, float]:
    return {r.event.step: r.event.loss for r in records if isinstance(r.event, StepDone)}
