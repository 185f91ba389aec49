"""A run in which one worker is killed, and what is compared afterwards."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import holdfast
from holdfast.events import (
    Event,
    GenerationStarted,
    RunFinished,
    StepDone,
    WorkerLost,
)
from holdfast.wire.journal import read_journal
from holdfast.wire.store.run_store import FolderStore
from tests.support.commands import apart, start
from tests.support.followed_run import DEADLINE, FollowedRun

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
    apart(
        *("run", script, "--folder", folder, "--workers", str(workers), *PLAIN, *arguments),
        folder=folder.parent,
        deadline=DEADLINE,
    ).succeeds()


def run_killed(script: Path, folder: Path, *arguments: str, workers: int, at: int) -> KilledRun:
    """Run the script; kill a worker when step `at` is done."""
    command = ("run", script, "--folder", folder, "--workers", str(workers), *PLAIN, *arguments)
    return run_with_a_kill(folder, at, *command, current=folder.parent)


def run_with_a_kill(
    folder: Path, at: int, *command: str | Path, current: Path | None = None
) -> KilledRun:
    """Run a command that trains in `folder`; kill the worker of the highest rank when step `at` is
    done. The run ends well, and loses no other worker."""
    run = FollowedRun(folder, start(*command, folder=current))
    run.until(lambda r: isinstance(r.event, StepDone) and r.event.step >= at and bool(run.pids))
    pids = dict(run.pids)
    killed = pids[max(pids)]
    os.kill(killed, signal.SIGKILL)
    ended = run.end()
    assert ended.code == 0, ended.err
    events = [record.event for record in read_journal(FolderStore(folder))]
    lost = [(e.cause, e.pid) for e in events if isinstance(e, WorkerLost)]
    assert lost == [("SIGKILL", killed)]
    return KilledRun(events, pids, killed, at, ended.out + ended.err)


def assert_continued_in_process(found: KilledRun, steps: int) -> None:
    """The survivors continued in the same step: they hold their state, no step was done twice, and
    none of them was replaced."""
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
