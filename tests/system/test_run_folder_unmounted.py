"""Agents whose run folder does not answer: its file system is not mounted, or its disk hangs."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from holdfast.elastic.agent.agent import IMMEDIATE_EXIT_CODE
from holdfast.elastic.agent.run_folder_monitor import FOLDER_LOST_MESSAGE
from holdfast.elastic.agent.term_monitor import TERM_CHECK_INTERVAL_S
from holdfast.events import GenerationStarted, RunFinished, RunStopped, StepDone, WorkerLost
from holdfast.wire.store.run_store import FolderStore
from holdfast.wire.term import newest_term
from tests.support.hung_disk_trainer import beside
from tests.support.processes import children_of
from tests.support.ranks import wait_until
from tests.support.trainer_process import Trainer, gone, training

MOVER = "holdfast.checkpoint.mover.main"
ENDLESS = {"steps": 1_000_000, "pace": 0.05}
LOOKS = 3 * TERM_CHECK_INTERVAL_S  # in which every agent has looked more than once
T = TypeVar("T", bound=Trainer)
NODES = (
    "cluster.interface=127.0.0.1",
    "layout.workers=2",
    "cluster.places=1",
    "cluster.beat_seconds=0.5",
    "cluster.settle_seconds=0.5",
    "cluster.gather_seconds=60",
)


class Disk:
    """A file system at the path of a run folder that comes and goes."""

    def __init__(self, root: Path) -> None:
        self._real, self.point = root / "disk", root / "run"
        self._real.mkdir()
        self.point.mkdir()

    def mount(self) -> bool:
        done = subprocess.run(
            ["mount", "--bind", self._real, self.point], capture_output=True, check=False
        )
        return done.returncode == 0

    def leave(self, check: bool = True) -> None:
        subprocess.run(["umount", "--lazy", self.point], capture_output=True, check=check)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path)
    if os.geteuid() or not disk.mount():
        pytest.skip("nothing can be mounted here")
    try:
        yield disk
    finally:
        disk.leave(check=False)


def _port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def _health(port: int) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=120) as answer:
        return dict(json.load(answer))


@contextmanager
def _also(trainer: T) -> Iterator[T]:
    try:
        yield trainer
    finally:
        trainer.process.kill()
        trainer.process.wait(120)


def _nobody_minds(disk: Disk, *trainers: Trainer) -> None:
    """No trainer ends, or writes where the file system was mounted."""
    for trainer in trainers:
        trainer.wait_for_line(FOLDER_LOST_MESSAGE)
        assert trainer.said.count(f"{FOLDER_LOST_MESSAGE}; waiting") == 1, trainer.said
    assert os.listdir(disk.point) == []


def _back(disk: Disk, one: Trainer, step: int) -> None:
    """Nothing has happened: the term and the generation are the ones there were."""
    assert disk.mount()
    one.wait_step(step + 20, 1)
    assert newest_term(FolderStore(disk.point))[0] == 1
    assert len(one.events(GenerationStarted)) == 1


@pytest.mark.slow
def test_one_node_trains_on_while_its_folder_is_not_mounted(tmp_path: Path, disk: Disk) -> None:
    port = _port()
    overrides = ("layout.workers=1", f"cluster.metrics_port={port}")
    with training(disk.point, ENDLESS, *overrides) as one:
        one.wait_step(2, 1)
        disk.leave()
        before = _health(port)["step"]
        time.sleep(LOOKS)
        _nobody_minds(disk, one)
        step = _health(port)["step"]
        assert step > before + 20
        _back(disk, one, step)
        os.kill(one.process.pid, signal.SIGTERM)
        assert one.end() == 0, one.said
        steps = [event.step for event in one.events(StepDone)]
        assert steps == list(range(1, steps[-1] + 1))
        assert [event.step for event in one.events(RunStopped)] == [steps[-1]]
    assert "Traceback" not in one.said


@pytest.mark.slow
def test_a_loss_while_the_folder_is_not_mounted_waits_for_it(tmp_path: Path, disk: Disk) -> None:
    with training(disk.point, ENDLESS, "layout.workers=1") as one:
        one.wait_step(2, 1)
        workers = one.workers(1)
        disk.leave()
        time.sleep(TERM_CHECK_INTERVAL_S)
        os.kill(workers[0], signal.SIGKILL)
        time.sleep(LOOKS)
        _nobody_minds(disk, one)
        assert disk.mount()
        one.wait_step(2, 2)
        assert newest_term(FolderStore(disk.point))[0] == 1
        assert len(one.events(WorkerLost)) == 1
        os.kill(one.process.pid, signal.SIGTERM)
        assert one.end() == 0, one.said
    assert "the workers cannot begin again yet (generation 2): the run folder" in one.said


@pytest.mark.slow
def test_no_mover_takes_what_lies_under_a_folder_that_is_not_mounted_for_it(
    tmp_path: Path, disk: Disk
) -> None:
    """It would hold that folder for ever, and write nothing into the right one."""
    with training(disk.point, ENDLESS, "layout.workers=1") as one:
        one.wait_step(2, 1)
        (mover,) = children_of(one.process.pid, MOVER)
        disk.leave()
        time.sleep(TERM_CHECK_INTERVAL_S)
        mover.kill()
        time.sleep(LOOKS)
        _nobody_minds(disk, one)
        assert not children_of(one.process.pid, MOVER)
        assert disk.mount()
        one.wait(lambda: children_of(one.process.pid, MOVER), "a new mover to start")
        done = max(event.step for event in one.events(StepDone))
        one.wait_step(done + 20, 1)
        os.kill(one.process.pid, signal.SIGTERM)
        assert one.end() == 0, one.said
        assert newest_term(FolderStore(disk.point))[0] == 1
    assert (
        one.said.count(f"there is no new mover yet, and no checkpoint: {FOLDER_LOST_MESSAGE}") == 1
    )


@pytest.mark.slow
def test_two_nodes_keep_their_leader_while_their_folder_is_not_mounted(
    tmp_path: Path, disk: Disk
) -> None:
    ports = {"a": _port(), "b": _port()}
    own = {
        name: (*NODES, f"cluster.node={name}", f"cluster.metrics_port={port}")
        for name, port in ports.items()
    }
    with (
        training(disk.point, ENDLESS | {"steps": 600}, *own["a"]) as one,
        _also(Trainer(disk.point, *own["b"])) as other,
    ):
        one.wait_step(2, 1)
        disk.leave()
        before = max(_health(port)["step"] for port in ports.values())
        time.sleep(LOOKS)
        _nobody_minds(disk, one, other)
        seen = [_health(port) for port in ports.values()]
        assert sorted(each["standing"] for each in seen) == ["following", "reigning"]
        step = max(each["step"] for each in seen)
        assert step > before + 20
        _back(disk, one, step)
        assert (one.end(), other.end()) == (0, 0), one.said + other.said
        assert [event.step for event in one.events(RunFinished)] == [600]


class Hanging(Trainer):
    """A trainer whose disk hangs on request, though those of other trainers do not: see
    `hung_disk`."""

    def __init__(self, folder: Path, seconds: float, *overrides: str) -> None:
        module = "tests.support.hung_disk_trainer"
        super().__init__(folder, *overrides, module=module, before=(str(seconds),))

    def hang(self) -> None:
        beside(self.folder).touch()
        time.sleep(1.5)  # until it has looked


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seconds", "again", "code"), [(3.0, False, 0), (60.0, True, IMMEDIATE_EXIT_CODE)]
)
def test_who_is_done_without_ends_though_its_disk_hangs(
    tmp_path: Path, seconds: float, again: bool, code: int
) -> None:
    """By itself, or at once with a second Ctrl-C."""
    grace = "cluster.grace_seconds=2"
    with ExitStack() as stack:
        one = stack.enter_context(training(tmp_path / "run", ENDLESS, *NODES, "cluster.node=a"))
        one.wait(lambda: newest_term(FolderStore(one.folder))[1], "it to lead")
        hanging = Hanging(one.folder, seconds, *NODES, grace, "cluster.node=b")
        other = stack.enter_context(_also(hanging))
        one.wait(lambda: "b" in _nodes(one), "both to work")
        family = other.family()
        other.hang()
        os.kill(other.process.pid, signal.SIGTERM)
        one.wait(lambda: _nodes(one) == ["a"], "the other to be done without")
        other.wait(lambda: "b has left the run" in other.said, "it to hear of that")
        if again:
            os.kill(other.process.pid, signal.SIGINT)
        assert other.end(15) == code, other.said
        wait_until(lambda: gone(family), what="no process is left")
        assert one.process.poll() is None


def _nodes(trainer: Trainer) -> list[str]:
    """Of the newest generation in which a step was done."""
    newest = max(
        (r.generation for r in trainer.records() if isinstance(r.event, StepDone)), default=0
    )
    begun = trainer.events(GenerationStarted, newest)
    return begun[0].topology["nodes"] if begun else []
