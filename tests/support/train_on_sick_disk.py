"""A run whose disk is sick for a while: `python -m tests.support.train_on_sick_disk FOLDER DISK
FAULT ALONE`.

    DISK     full, hanging, read-only
    FAULT    loss: one of three workers is killed meanwhile
             notice: one of three nodes is told to go, and is killed when its time is up
             node: of three nodes, the one that reports the steps is killed
    ALONE    the folder of the same run, undisturbed

Only the run folder, FOLDER/run, is on that disk. Everything is judged by what `train --json` prints
and by the run folder at the end. Prints what was seen as one JSON line.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Protocol

import psutil

from holdfast.core.data.lineage import split_effective
from holdfast.events import StepDone
from holdfast.wire.journal import read_journal
from holdfast.wire.store.run_store import FolderStore
from holdfast_lab.chaos.compare import compare_runs
from tests.support.commands import apart
from tests.support.faulty_disk import FaultyDisk
from tests.support.train_on_full_disk import fill
from tests.support.watched_run import WatchedRun

STEPS = 500
SETTINGS = (
    f"train.steps={STEPS}",
    "train.batch_size=6",
    "train.evaluate.every=0",
    "checkpoint.every_steps=20",
    "checkpoint.keep_last=2",
    "layout.workers=3",
    "cluster.threads_per_worker=1",
)
GRACE_S = 8
SEVERAL = (
    "cluster.places=1",
    "cluster.beat_seconds=0.5",
    "cluster.settle_seconds=0.5",
    "cluster.gather_seconds=60",
    f"cluster.grace_seconds={GRACE_S}",
)
SICK_S = 3.0
"""Seconds for which the disk stays sick after the loss."""


class SickDisk(Protocol):
    def fall_ill(self) -> None: ...
    def recover(self) -> None: ...
    def close(self) -> None: ...


class FullDisk:
    """A small tmpfs that is filled up."""

    def __init__(self, root: Path) -> None:
        self._point = root / "run"
        mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "none", str(self._point)]
        subprocess.run(mount, check=True)

    def fall_ill(self) -> None:
        fill(self._point / "filler")

    def recover(self) -> None:
        (self._point / "filler").unlink(missing_ok=True)

    def close(self) -> None:
        """Nothing is left: the namespace ends with this process."""


class OrderedDisk:
    """A file system in user space that obeys."""

    def __init__(self, root: Path, illness: str) -> None:
        (root / "disk").mkdir()
        self._illness = illness
        self._disk = FaultyDisk(root / "disk", root / "run")

    def fall_ill(self) -> None:
        self._disk.order(self._illness)

    def recover(self) -> None:
        self._disk.order("well")

    def close(self) -> None:
        self._disk.close()


def _make_disk(root: Path, kind: str) -> SickDisk:
    (root / "run").mkdir()
    if kind == "full":
        return FullDisk(root)
    return OrderedDisk(root, {"hanging": "hang", "read-only": "read-only"}[kind])


def _lose_worker(run: WatchedRun) -> list[int]:
    """Kill a worker; return the remaining ones."""
    victim, *survivors = run.workers()
    os.kill(victim, signal.SIGKILL)
    run.wait(lambda: run.events("worker_lost"), "the loss")
    return survivors


def _lose_node(run: WatchedRun) -> list[int]:
    """Tell the last node to go, and kill it when its time is up; return the other workers."""
    goes = run.agents.pop("c")
    family = {child.pid for child in psutil.Process(goes.pid).children(recursive=True)}
    os.kill(goes.pid, signal.SIGTERM)
    try:
        goes.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        goes.kill()
    return [pid for pid in run.workers() if pid not in family]


def _lose_reporter(run: WatchedRun) -> list[int]:
    """Kill the node of rank 0, whose agent has the steps; return the other workers."""
    name = run.events("generation_started")[-1]["topology"]["nodes"][0]
    agent = run.agents.pop(name)
    family = psutil.Process(agent.pid).children(recursive=True)
    for process in (agent, *family):
        process.kill()
    return [pid for pid in run.workers() if pid not in {child.pid for child in family}]


FAULTS = {"loss": _lose_worker, "notice": _lose_node, "node": _lose_reporter}


def main(root: Path, kind: str, fault: str, alone: Path) -> None:
    disk = _make_disk(root, kind)
    several = fault != "loss"
    settings, nodes = (*SETTINGS, *SEVERAL), ("a", "b", "c")
    run = WatchedRun(root / "run.yaml", *((settings, nodes) if several else (SETTINGS,)))
    seen: dict[str, object] = {}
    try:
        run.wait(lambda: len(run.workers()) >= 3, "three workers")
        run.wait(lambda: run.newest("checkpoint_committed") >= 40, "two checkpoints")
        disk.fall_ill()
        seen["ill_at"] = run.newest("step_done")
        run.wait_steps(60)
        survivors = FAULTS[fault](run)
        before = run.newest_generation
        time.sleep(SICK_S)
        seen["alive"] = all(psutil.pid_exists(pid) for pid in survivors)
        disk.recover()
        run.wait(lambda: run.newest_generation > before, "the next generation")
        seen["codes"] = run.end()
    except BaseException:
        print("".join(run.said), file=sys.stderr)
        raise
    finally:
        disk.recover()
        run.close()
    records = read_journal(FolderStore(root / "run"))
    dropped = [each.event for each in split_effective(records)[1]]
    superseded = [event.step for event in dropped if isinstance(event, StepDone)]
    audit = apart("data", "audit", root / "run")
    verify = apart("checkpoint", "verify", root / "run")
    compared = compare_runs(root / "run", alone, STEPS, 0.0)
    report = json.loads(apart("report", root / "run", "--json").out)
    lost = [event["pid"] for event in run.events("worker_lost")]
    seen |= {
        "said": "".join(run.said),
        "superseded": superseded,
        "holes": report.get("holes", []),
        "kept": not set(survivors) & set(lost),
        "lost": [survivors, run.events("worker_lost")],
        "audit": [audit.code, audit.out],
        "verify": [verify.code, verify.out],
        "differs": [compared.curve, compared.ledger, compared.tensors],
        "generations": [
            [r["generation"], r["event"]["step"], r["event"]["rung"], r["event"]["reason"]]
            for r in run.records
            if r["kind"] == "generation_started"
        ],
        "left": [str(path) for path in (root / "run").rglob(".tmp*")],
    }
    disk.close()
    print(json.dumps(seen))


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4]))
