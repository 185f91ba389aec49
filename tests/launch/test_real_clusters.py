"""Disposable clusters of a real Slurm and a real Ray: five nodes, and nothing left behind."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from holdfast.launch.clusters.cluster import ClusterState
from holdfast.launch.clusters.lifecycle import take_down
from holdfast.launch.clusters.processes import all_of
from holdfast.launch.clusters.states import ClusterStates
from tests.support.commands import Outcome, apart
from tests.support.ray_cluster import needs_ray
from tests.support.slurm_cluster import INSTALL, is_installed

pytestmark = pytest.mark.slow
needs_slurm = pytest.mark.skipif(not is_installed(), reason=INSTALL)
USABLE_S = 90.0
DEADLINE_S = 120.0


@pytest.fixture(autouse=True)
def states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ClusterStates]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    found = ClusterStates()
    yield found
    for name in found.names():
        if state := found.read(name):
            take_down(found, state)


def up(kind: str) -> Outcome:
    done = apart("cluster", "up", "try", "--kind", kind, "--nodes", "5", deadline=DEADLINE_S)
    assert done.code == 0, done.err
    return done


def read(states: ClusterStates) -> ClusterState:
    state = states.read("try")
    assert state is not None
    return state


def kill(state: ClusterState, name: str) -> None:
    process = psutil.Process(int(state.processes[name].partition("@")[0]))
    process.kill()


def down(state: ClusterState) -> None:
    done = apart("cluster", "down", "try", deadline=DEADLINE_S)
    assert done.code == 0, done.err
    assert all_of(state) == set()
    assert not state.folder.exists()


@needs_slurm
def test_five_nodes_of_slurm(states: ClusterStates) -> None:
    begun = time.monotonic()
    up("slurm")
    assert time.monotonic() - begun < USABLE_S
    state = read(states)
    environ = os.environ | {"SLURM_CONF": str(state.folder / "slurm.conf")}
    command = ["srun", "-N", "5", "printenv", "SLURMD_NODENAME"]
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    assert sorted(done.stdout.split()) == state.node_names
    job = ["sbatch", "-N", "2", "-o", "/dev/null", "--wrap", "srun sleep 3600"]
    subprocess.run(job, env=environ, capture_output=True, timeout=DEADLINE_S, check=True)
    deadline = time.monotonic() + DEADLINE_S
    while not any(each.name() == "sleep" for each in all_of(state)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    down(state)


@needs_ray
def test_five_nodes_of_ray(states: ClusterStates) -> None:
    begun = time.monotonic()
    printed = up("ray").out
    assert time.monotonic() - begun < USABLE_S
    state = read(states)
    assert printed == f"export RAY_ADDRESS=127.0.0.2:{state.ports['head']}\n"
    (row,) = json.loads(apart("cluster", "list", "--json").out)
    assert row["daemons alive"] == "6 of 6"
    down(state)
