"""Disposable clusters of a real Slurm and a real Ray: five nodes, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast_platform.clusters.cluster import ClusterState, ClusterStates
from holdfast_platform.clusters.processes import all_of
from tests.support.commands import apart
from tests.support.disposable_clusters import (
    DEADLINE_S,
    check_nothing_left,
    clusters_ended,
    down,
    read,
    up,
)
from tests.support.ranks import wait_until
from tests.support.ray_cluster import needs_ray
from tests.support.slurm_cluster import INSTALL, is_installed

pytestmark = pytest.mark.slow
needs_slurm = pytest.mark.skipif(not is_installed(), reason=INSTALL)
NODES = 5
USABLE_S = 90.0


@pytest.fixture(autouse=True)
def _states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with clusters_ended():
        yield


@needs_slurm
def test_five_nodes_of_slurm() -> None:
    begun = time.monotonic()
    up("slurm", NODES)
    assert time.monotonic() - begun < USABLE_S
    state = read()
    environ = os.environ | {"SLURM_CONF": str(state.folder / "slurm.conf")}
    command = ["srun", "-N", "5", "printenv", "SLURMD_NODENAME"]
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    assert sorted(done.stdout.split()) == state.node_names
    job = ["sbatch", "-N", "2", "-o", "/dev/null", "--wrap", "srun sleep 3600"]
    subprocess.run(job, env=environ, capture_output=True, timeout=DEADLINE_S, check=True)
    wait_until(lambda: any(each.name() == "sleep" for each in all_of(state)), pause_s=0.1)
    down(state)


@needs_ray
def test_five_nodes_of_ray() -> None:
    begun = time.monotonic()
    printed = up("ray", NODES).out
    usable = time.monotonic() - begun
    assert usable < USABLE_S
    state = read()
    assert printed == f"export RAY_ADDRESS=127.0.0.2:{state.ports['head']}\n"
    (row,) = json.loads(apart("cluster", "list", "--json").out)
    assert row["daemons alive"] == "6 of 6"
    begun = time.monotonic()
    down(state)
    print(f"\nfive nodes of Ray: usable {usable:.1f} s, down {time.monotonic() - begun:.1f} s")


@needs_ray
def test_an_interrupted_start_leaves_nothing() -> None:
    command = ("cluster", "up", "try", "--kind", "ray", "--nodes", str(NODES), "--cpus", "1")
    child = subprocess.Popen(
        [sys.executable, "-m", "holdfast.cli.main", *command], stderr=subprocess.PIPE, text=True
    )

    def second_node() -> ClusterState | None:
        state = ClusterStates().read("try")
        return state if state is not None and "n2" in state.processes else None

    state = wait_until(second_node)
    assert state is not None
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=DEADLINE_S)
    assert child.returncode == 128 + signal.SIGINT, said
    assert "Traceback" not in said
    check_nothing_left(state)
