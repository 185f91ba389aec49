"""Disposable clusters come up, are mended and leave nothing. Daemons are scripts
(`tests/platform/test_clusters.py`); a real Slurm and Ray are in `test_real_clusters.py`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast_platform.clusters.cluster import MARK, ClusterStates
from holdfast_platform.clusters.lifecycle import take_down
from tests.support.commands import Outcome, within
from tests.support.ranks import DEADLINE_S, wait_until

UP = ("cluster", "up", "try", "--kind", "slurm", "--nodes", "2", "--cpus", "1")


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "bin"
    write_fake_daemons(folder)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    yield folder
    states = ClusterStates()
    for name in states.names():
        if state := states.read(name):
            take_down(states, state)


def note() -> dict[str, Any]:
    path = ClusterStates().path("try")
    assert path.stat().st_mode & 0o777 == 0o600
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def kill(name: str) -> None:
    process = psutil.Process(int(note()["processes"][name].partition("@")[0]))
    process.kill()
    process.wait(DEADLINE_S)


def marked(folder: str) -> list[psutil.Process]:
    found = []
    for each in psutil.process_iter():
        try:
            if each.environ().get(MARK) == folder:
                found.append(each)
        except (psutil.Error, OSError):
            continue
    return found


def up() -> Outcome:
    done = within(*UP)
    assert done.code == 0, done.err
    return done


def test_up_and_down_leave_nothing(programs: Path) -> None:
    first = up()
    folder = note()["folder"]
    assert first.out == f"export SLURM_CONF={folder}/slurm.conf\n"
    assert "holdfast launch run.yaml --on slurm --nodes 2" in first.err
    # a daemon may be up before what it starts is
    wait_until(lambda: len(marked(folder)) == 5, DEADLINE_S, "three daemons, and a child of two")
    before = note()
    again = up()
    assert "cluster try is there" in again.err
    assert (note(), again.out) == (before, first.out)
    (row,) = json.loads(within("cluster", "list", "--json").out)
    assert (row["name"], row["daemons alive"]) == ("try", "3 of 3")

    down = within("cluster", "down", "try")
    assert (down.code, marked(folder), Path(folder).exists()) == (0, [], False)
    assert "5 processes have ended" in down.err
    assert within("cluster", "down", "try").code == 0
    assert json.loads(within("cluster", "list", "--json").out) == []


def test_up_starts_what_has_ended(programs: Path) -> None:
    up()
    before = note()
    kill("slurmctld")
    kill("n1")
    assert "has lost n1, slurmctld" in up().err
    after = note()
    assert after["ports"] == before["ports"]
    changed = {n for n, at in after["processes"].items() if before["processes"][n] != at}
    assert changed == {"n1", "slurmctld"}


def test_a_cluster_of_before_a_restart_of_the_machine_starts_again(programs: Path) -> None:
    up()
    before = note()
    for each in marked(before["folder"]):
        each.kill()
    psutil.wait_procs(marked(before["folder"]), DEADLINE_S)
    assert "starts again in another folder" in up().err
    assert not Path(before["folder"]).exists()
    assert note()["folder"] != before["folder"]


def test_a_process_that_has_the_number_of_a_daemon_is_left_alone(programs: Path) -> None:
    up()
    stranger = subprocess.Popen(["sleep", "60"])
    try:
        path = ClusterStates().path("try")
        content = note()
        kill("n1")
        content["processes"]["n1"] = f"{stranger.pid}@1.0"
        path.write_text(json.dumps(content))
        assert within("cluster", "down", "try").code == 0
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_up_leaves_nothing(programs: Path, number: signal.Signals) -> None:
    (programs / "hangs").touch()
    command = [sys.executable, "-m", "holdfast.cli.main", *UP]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    path = ClusterStates().path("try")

    def is_up() -> bool:
        assert child.poll() is None
        return path.exists() and len(note()["processes"]) == 3

    wait_until(is_up, what="three processes")
    folder = note()["folder"]
    child.send_signal(number)
    said = child.communicate(timeout=DEADLINE_S)[1]
    assert child.returncode == 128 + number, said
    assert (marked(folder), Path(folder).exists(), path.exists()) == ([], False, False)


def test_a_daemon_that_cannot_start_is_named_with_its_words(programs: Path) -> None:
    (programs / "refuses").touch()
    within(*UP).refuses("slurmctld of cluster try has ended: error: no such plugin")
    assert ClusterStates().names() == []


# --- Slurm's programs as scripts that only wait ---------------------------------------------------
WAIT = """\
#!{python}
import os, signal, sys, socket
if os.path.exists("{folder}/refuses"):
    sys.exit("error: no such plugin")
config = dict(l.strip().split("=", 1) for l in open(os.environ["SLURM_CONF"]) if "=" in l)
if sys.argv[0].endswith("slurmctld"):
    server = socket.create_server(("127.0.0.1", int(config["SlurmctldPort"])))
else:
    if os.fork() == 0:  # a step, in a session of its own and without a parent
        os.setsid()
        if os.fork():
            os._exit(0)
        signal.pause()
    open(os.path.join(os.path.dirname(os.environ["SLURM_CONF"]), sys.argv[3] + ".up"), "w")
signal.pause()
"""
SINFO = """\
#!/bin/sh
[ -e {folder}/hangs ] && exit 0
for each in "$(dirname "$SLURM_CONF")"/*.up; do echo idle; done
"""


def write_fake_daemons(folder: Path) -> None:
    folder.mkdir()
    for name in ("slurmctld", "slurmd"):
        (folder / name).write_text(WAIT.format(python=f"{sys.executable} -S", folder=folder))
    for name in ("sinfo", "sbatch", "srun", "scontrol"):
        (folder / name).write_text(SINFO.format(folder=folder))
    for each in folder.iterdir():
        each.chmod(0o755)
