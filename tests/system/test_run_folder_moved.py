"""The run folder is moved away or out of reach while a run trains, is asked to leave, or loses its
mover."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from holdfast.checkpoint.restore.catalog import list_commits, step_of
from holdfast.core.format.manifest import parse_commit_key
from holdfast.elastic.agent.run_folder_monitor import FOLDER_GONE_MESSAGE, FOLDER_RETURN_TIMEOUT_S
from holdfast.elastic.agent.shutdown import DEFAULT_LEAVE_TIMEOUT_S
from holdfast.elastic.protocol.fault_orders import FaultOrders
from holdfast.events import GenerationStarted
from holdfast.wire.journal import read_journal
from holdfast.wire.store.run_store import FolderStore
from tests.support.commands import start, within, write_run_file
from tests.support.nodes import Nodes, nodes_of
from tests.support.processes import children_of
from tests.support.ranks import DEADLINE_S, wait_until

SETTINGS = (
    "train.steps=100000",
    "train.batch_size=6",
    "train.evaluate.every=0",
    "checkpoint.every_steps=20",
    "layout.workers=2",
)
CLEAN = 30.0  # on top of the waits: processes end, on a busy machine


def _train(nodes: Nodes) -> None:
    nodes.start("a", "b")
    nodes.wait_step(20, nodes={"a", "b"})
    nodes.wait_until(lambda: list_commits(FolderStore(nodes.folder)), "nothing is saved")


def _end_within(nodes: Nodes, seconds: float) -> None:
    begun = time.monotonic()
    codes = nodes.end()
    took = time.monotonic() - begun
    assert codes == {"a": 1, "b": 1}, nodes.story()
    assert took < seconds + CLEAN, nodes.story()
    assert "Traceback" not in nodes.said


def _point(link: Path, target: str) -> None:
    new = link.with_name("new")
    new.unlink(missing_ok=True)
    new.symlink_to(target)
    os.replace(new, link)


@pytest.mark.slow
def test_a_folder_that_was_moved_is_waited_for_and_then_all_leave(
    run_file: Path, tmp_path: Path
) -> None:
    folder, moved = tmp_path / "run", tmp_path / "moved"
    with nodes_of(run_file, folder, *SETTINGS) as nodes:
        _train(nodes)
        folder.rename(moved)
        time.sleep(FOLDER_RETURN_TIMEOUT_S / 8)
        assert nodes.alive == ["a", "b"], nodes.story()
        moved.rename(folder)
        # Nothing has been lost, and no worker had to restart.
        newest = step_of(list_commits(FolderStore(folder))[0])
        nodes.wait_until(
            lambda: step_of(list_commits(FolderStore(folder))[0]) > newest + 20, "nothing is saved"
        )
        assert len(nodes.events(GenerationStarted)) == 1
        folder.rename(moved)
        _end_within(nodes, FOLDER_RETURN_TIMEOUT_S)
        assert nodes.said.count(f"{FOLDER_GONE_MESSAGE}\n") == 2, nodes.said
        assert not folder.exists()


@pytest.mark.slow
@pytest.mark.parametrize("names", ["a", "ab"])
def test_a_run_whose_store_was_emptied_does_not_end_well(
    run_file: Path, tmp_path: Path, names: str
) -> None:
    """Not even if it trains its last step before anything is noticed."""
    faults = FaultOrders(tmp_path / "gate")
    faults.prepare(20)
    steps = (*SETTINGS, "train.steps=60", f"cluster.faults={faults.folder}")
    workers = f"layout.workers={len(names)}"
    with nodes_of(run_file, tmp_path / "run", *steps, workers) as nodes:
        nodes.start(*names)
        nodes.wait_step(20, nodes={*names})
        nodes.wait_until(lambda: list_commits(nodes.store), "nothing is saved")
        for key in nodes.store.list(""):
            nodes.store.delete(key)
        faults.open_gate(60)
        assert set(nodes.end().values()) == {1}, nodes.story()
    assert FOLDER_GONE_MESSAGE in nodes.said
    assert re.search(r"a holds the state of rank \d after step \d+", nodes.said)
    assert "resume with" not in nodes.said
    assert not re.search(r"checkpoint of step [456]0 committed", nodes.said)


@pytest.mark.slow
def test_who_is_told_to_go_does_not_wait_for_a_folder_that_was_moved(
    run_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with nodes_of(run_file, folder, *SETTINGS) as nodes:
        _train(nodes)
        folder.rename(tmp_path / "moved")
        time.sleep(3)
        for name in "ab":
            nodes.signal(name, signal.SIGTERM)
        _end_within(nodes, DEFAULT_LEAVE_TIMEOUT_S)
        assert FOLDER_GONE_MESSAGE in nodes.said


@pytest.mark.slow
def test_a_folder_out_of_reach_ends_nobody_but_who_is_told_to_go(
    run_file: Path, tmp_path: Path
) -> None:
    folder, real = tmp_path / "run", tmp_path / "real"
    real.mkdir()
    _point(folder, real.name)
    with nodes_of(run_file, folder, *SETTINGS) as nodes:
        _train(nodes)
        _point(folder, folder.name)  # to itself: it cannot be opened
        time.sleep(FOLDER_RETURN_TIMEOUT_S + 5)
        assert nodes.alive == ["a", "b"], nodes.story()
        before = step_of(list_commits(FolderStore(real))[0])
        _point(folder, real.name)
        nodes.wait_until(
            lambda: step_of(list_commits(FolderStore(real))[0]) > before + 20, "nothing is saved"
        )
        assert len(nodes.events(GenerationStarted)) == 1
        _point(folder, folder.name)
        for name in "ab":
            nodes.signal(name, signal.SIGTERM)
        _end_within(nodes, DEFAULT_LEAVE_TIMEOUT_S)
        assert nodes.said.count("SIGTERM: the run folder is out of reach") == 2, nodes.said


SAVING = (
    "train.steps=1000000",
    "checkpoint.every_steps=50",
    "checkpoint.memory_every_steps=1",
    "train.evaluate.every=0",
    "cluster.threads_per_worker=1",
)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_mover_that_cannot_be_started_at_once_is_started_later(
    workers: int, tmp_path: Path
) -> None:
    path = write_run_file(tmp_path)
    assert within("data", "prepare", path).code == 0
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    _point(link, real.name)
    process = start("train", path, f"folder={link}", *SAVING, f"layout.workers={workers}")
    said: list[str] = []
    for stream in (process.stdout, process.stderr):
        assert stream is not None
        threading.Thread(target=said.extend, args=(stream,), daemon=True).start()
    try:
        wait_until(lambda: _newest(real) > 0)
        _point(link, link.name)  # to itself: it cannot be opened
        _movers(process.pid)[0].kill()
        wait_until(lambda: not _movers(process.pid))
        wait_until(lambda: any("there is no new mover yet" in line for line in said))
        before = _newest(real)
        _point(link, real.name)
        wait_until(lambda: _newest(real) > before + 50)
        process.send_signal(signal.SIGTERM)
        process.wait(DEADLINE_S)
    finally:
        process.kill()
    begun = [r for r in read_journal(FolderStore(real)) if isinstance(r.event, GenerationStarted)]
    assert len(begun) == 1, "the workers went on"


def _newest(folder: Path) -> int:
    """The step of the newest checkpoint; 0 for none."""
    positions = [parse_commit_key(key) for key in list_commits(FolderStore(folder))]
    return max((found[0] for found in positions if found is not None), default=0)


def _movers(agent: int) -> list[psutil.Process]:
    return children_of(agent, "holdfast.checkpoint.mover.main")
