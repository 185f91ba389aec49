"""The same command on a second machine that shares the run folder, while the first one trains.

The second machine has a host name and a network of its own: the trainer's address leads nowhere
there."""

from __future__ import annotations

import platform
import signal
import subprocess
from pathlib import Path

import pytest

from holdfast.checkpoint.restore.catalog import list_commits
from holdfast.events import GenerationStarted
from holdfast.wire.store.run_store import FolderStore
from holdfast.wire.term import newest_term
from tests.support.commands import Outcome, start
from tests.support.nodes import nodes_of
from tests.support.ranks import DEADLINE_S

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
