"""A run of `holdfast run` in which one worker is killed, and what is compared afterwards."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path

import holdfast
from holdfast.events import (
    Event,
    GenerationStarted,
    RunFinished,
    StepDone,
    WorkerLost,
    WorkerStarted,
)
from holdfast.wire.journal import follow_journal, read_journal
from holdfast.wire.store.run_store import FolderStore
from tests.support.commands import apart, start

DEADLINE = 240  # seconds for a run on a busy machine
PLAIN = ("--set", "device=cpu", "--set", "cluster.threads_per_worker=1")


@dataclass(frozen=True)
class KilledRun:
    """events: the journal. pids: of the first generation, by rank. killed: the process that was
    killed. at: the newest step then. said: the command's output."""

    events: list[Event]
    pids: dict[int, int]
    killed: int
    at: int
    said: str


def run_undisturbed(script: Path, folder: Path, *arguments: str, workers: int = 1) -> None:
    found = apart(
        *("run", script, "--folder", folder, "--workers", str(workers), *PLAIN, *arguments),
        folder=folder.parent,
        deadline=DEADLINE,
    )
    assert found.code == 0, found.out + found.err


def run_killed(script: Path, folder: Path, *arguments: str, workers: int, at: int) -> KilledRun:
    """Run the script; kill the worker of the highest rank when step `at` is done."""
    process = start(
        *("run", script, "--folder", folder, "--workers", str(workers), *PLAIN, *arguments),
        folder=folder.parent,
    )
    done, output = threading.Event(), list[str]()

    def collect() -> None:
        output.extend(process.communicate(timeout=DEADLINE))
        done.set()

    collector = threading.Thread(target=collect)
    collector.start()
    pids, killed = dict[int, int](), 0
    for records in follow_journal(FolderStore(folder), poll_interval_s=0.02, stop=done):
        for event in (record.event for record in records):
            if isinstance(event, WorkerStarted):
                pids[event.rank] = event.pid
            if isinstance(event, StepDone) and event.step >= at and not killed:
                killed = pids[max(pids)]
                os.kill(killed, signal.SIGKILL)
        if killed:
            break
    collector.join(DEADLINE)
    assert process.returncode == 0, output
    events = [record.event for record in read_journal(FolderStore(folder))]
    return KilledRun(events, pids, killed, at, "".join(output))


def assert_continued_in_process(found: KilledRun, steps: int) -> None:
    """The survivors continued in the same step: they hold their state, no step was done twice, and
    none of them was replaced."""
    lost = [e for e in found.events if isinstance(e, WorkerLost)]
    assert [(e.cause, e.pid) for e in lost] == [("SIGKILL", found.killed)]
    following = next(
        e for e in found.events if isinstance(e, GenerationStarted) and e.reason == "worker_lost"
    )
    assert following.came_from is not None, "the survivors hold the state"
    kept = {found.pids[rank] for rank in following.came_from if rank is not None}
    assert kept == set(found.pids.values()) - {found.killed} != set()
    done = [e.step for e in found.events if isinstance(e, StepDone)]
    assert sorted(set(done)) == list(range(1, steps + 1))
    assert following.step >= found.at, "no step is done a second time"
    assert sum(isinstance(e, RunFinished) for e in found.events) == 1


def assert_same_bits(left: Path, right: Path, step: int) -> None:
    one, other = holdfast.open_checkpoint(left), holdfast.open_checkpoint(right)
    assert one.step == other.step == step
    assert list(one.names) == list(other.names)
    for name in one.names:
        assert one[name].numpy().tobytes() == other[name].numpy().tobytes(), name
