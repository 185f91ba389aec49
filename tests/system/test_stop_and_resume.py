"""Starting, stopping and starting over, with real processes. The same command on a second machine
that shares the run folder, while the first one trains. The second machine has a host name and a
network of its own: the trainer's address leads nowhere there."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.checkpoint.restore.catalog import list_commits
from holdfast.elastic.protocol.fault_orders import FaultOrders
from holdfast.events import GenerationStarted
from holdfast.wire.store.run_store import FolderStore
from holdfast.wire.term import newest_term
from tests.support.commands import Outcome, apart, start, within, write_run_file
from tests.support.nodes import nodes_of
from tests.support.ranks import DEADLINE_S

LONG = ("train.steps=100000", "checkpoint.every_steps=0", "train.evaluate.every=0")


def wait_for_step(process: subprocess.Popen[str], kind: str = "step_done") -> None:
    """Read the journal that `train --json` prints until a step is done."""
    assert process.stdout is not None
    for line in process.stdout:
        if json.loads(line)["kind"] == kind:
            return
    raise AssertionError(process.stderr.read() if process.stderr else "it ended")


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """A run file, and a trainer that is somewhere in its steps, and has time."""
    run_file = write_run_file(tmp_path)
    slow = FaultOrders(tmp_path / "slow")
    slow.prepare()
    slow.set_slow_ranks({0: 0.05})
    process = start("train", run_file, *LONG, f"cluster.faults={slow.folder}", "--json")
    try:
        wait_for_step(process)
        yield run_file, process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def end(process: subprocess.Popen[str]) -> Outcome:
    out, err = process.communicate(timeout=120)
    return Outcome(process.returncode, out, err)


@pytest.mark.slow
def test_two_trainers_ctrl_c_and_fresh(running: tuple[Path, subprocess.Popen[str]]) -> None:
    run_file, process = running
    folder = run_file.parent / "run"

    # A second trainer is refused, whatever it wants.
    for more in ((), ("--fresh",)):
        second = apart("train", run_file, *LONG, *more)
        second.refuses("another trainer", str(process.pid))
    assert process.poll() is None

    # Ctrl-C saves and leaves.
    process.send_signal(signal.SIGINT)
    left = end(process)
    assert left.code == 0, left.err
    assert "resume with: holdfast train" in left.err
    assert len(list((folder / "commits").iterdir())) == 1

    # --fresh keeps the old folder.
    fresh = apart("train", run_file, "--fresh").succeeds()
    assert f"the old run folder is now {folder}.old-1" in fresh.err
    assert list((folder.with_name("run.old-1") / "commits").iterdir())
    assert json.loads((folder / "resolved.json").read_text())["config"]["train"]["steps"] == 6


@pytest.mark.slow
def test_a_run_that_goes_on_may_remove_what_is_read(tmp_path: Path) -> None:
    """Retention is as quick as it can be: each save removes the checkpoint before it."""
    run_file = write_run_file(tmp_path)
    process = start(
        "train", run_file, *LONG, "checkpoint.every_steps=1", "checkpoint.keep_last=1", "--json"
    )
    drained = threading.Thread(target=lambda: [None for _ in process.stdout or ()], daemon=True)
    try:
        wait_for_step(process, "checkpoint_committed")
        drained.start()
        folder = run_file.parent / "run"
        for command in (
            ["generate", folder, "the", "--tokens", "2"],
            ["export", folder, "--to", tmp_path / "model"],
            ["checkpoint", "list", folder],
            ["checkpoint", "verify", folder],
        ):
            found = apart(*command)
            busy = "faster than they can be read" in found.err
            assert found.code == 0 or (found.code == 2 and busy), (command, found)
            assert "Traceback" not in found.err
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.slow
def test_a_trainer_that_is_killed_is_missed(running: tuple[Path, subprocess.Popen[str]]) -> None:
    """`watch` does not wait for the dead, and `report` does not call them running."""
    run_file, process = running
    folder = run_file.parent / "run"
    alive = apart("report", folder, "--json")
    assert json.loads(alive.out)["state"] == "running"
    watcher = start("watch", folder, "--json")
    assert watcher.stdout is not None
    assert json.loads(watcher.stdout.readline())["kind"] == "run_started"
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(120)
    watched = end(watcher)
    assert watched.code == 1, watched.err
    assert "no trainer is at work here: it ended without a word after step" in watched.err
    story = json.loads(apart("report", folder, "--json").out)
    assert (story["state"], story["sessions"][-1]["ended"]) == ("lost", "lost")


def test_a_second_ctrl_c_leaves_at_once(running: tuple[Path, subprocess.Popen[str]]) -> None:
    _, process = running
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    for line in process.stdout:
        if json.loads(line)["kind"] == "stop_requested":
            break
    process.send_signal(signal.SIGINT)
    left = end(process)
    # Between the two, the workers may have been quicker.
    assert left.code in (0, 130)
    assert "Traceback" not in left.err


@pytest.mark.slow
def test_a_resume_goes_on_on_another_number_of_workers(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path)
    process = start("train", run_file, "train.steps=120", "train.evaluate.every=0", "--json")
    wait_for_step(process)
    process.send_signal(signal.SIGTERM)
    assert end(process).code == 0
    done = apart(
        "train", run_file, "train.steps=120", "train.evaluate.every=0", "layout.workers=1", "--json"
    ).succeeds()
    records = [json.loads(line) for line in done.out.splitlines()]
    first = next(r for r in records if r["kind"] == "generation_started")
    assert first["event"]["reason"] == "resume"
    assert first["event"]["step"] > 0
    assert len(first["event"]["topology"]["nodes"]) == 1
    audit = within("data", "audit", tmp_path / "run")
    assert (audit.code, "120 steps" in audit.out) == (0, True), audit.out


SECOND = "second-machine"
SETTINGS = (
    "train.steps=100000",
    "train.evaluate.every=0",
    "checkpoint.every_steps=20",
    "layout.workers=1",
)


def _machine(*options: str) -> list[str]:
    setup = f'hostname {SECOND} && ip link set lo up && exec "$@"'
    return ["unshare", "--net", "--uts", *options, "sh", "-c", setup, "sh"]


def _second_machine() -> list[str]:
    """What to put before a command, so that it runs on another machine; skips if that cannot be."""
    for options in ((), ("--map-root-user",)):
        probe = [*_machine(*options), "true"]
        done = subprocess.run(probe, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return _machine(*options)
    pytest.skip(f"no host name and network of its own can be made here: {done.stderr.strip()}")


def _on(machine: list[str], *arguments: str | Path) -> Outcome:
    process = start(*arguments, before=machine)
    try:
        out, err = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    return Outcome(process.returncode, out, err)


@pytest.mark.slow
def test_a_run_is_not_taken_from_a_machine_that_trains(run_file: Path, tmp_path: Path) -> None:
    folder, machine = tmp_path / "run", _second_machine()
    command = ("train", run_file, f"folder={folder}", *SETTINGS)
    with nodes_of(run_file, folder, *SETTINGS) as nodes:
        nodes.agents["first"] = start(*command)
        nodes.wait_until(lambda: list_commits(FolderStore(folder)), "nothing is saved")
        for more in (
            command,
            (*command, "--fresh"),
            (*command, "cluster.node=n"),
            ("checkpoint", "prune", folder, "--keep-last", "1"),
        ):
            refused = _on(machine, *more)
            alone = "trains this run without other nodes" if "cluster.node=n" in more else ""
            words = (alone,) if alone else ("another trainer uses", "since 2", "last step ")
            refused.refuses_last(f"process {nodes.agents['first'].pid}", platform.node(), *words)
        assert [path.name for path in tmp_path.iterdir() if "run" in path.name] == ["run"]
        newest = nodes.newest
        nodes.wait_step(max(nodes.losses()) + 20)
        assert (nodes.newest, newest_term(FolderStore(folder))[0]) == (newest, 1)
        assert len(nodes.events(GenerationStarted)) == 1

        # The first machine is lost: nothing grows any more, and the second one may have the run.
        nodes.kill("first")
        done = max(nodes.losses())
        nodes.agents["second"] = start(*command, before=machine)
        nodes.wait_step(done, newest)
        nodes.signal("second", signal.SIGTERM)
        assert nodes.end() == {"second": 0}, nodes.story()
        assert "does not answer: waiting up to 30 s for a sign of life" in nodes.said
