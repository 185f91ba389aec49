"""`holdfast train` under the real torchrun, mpirun and srun."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.support.commands import Outcome, apart
from tests.support.nodes import Nodes, prepared
from tests.support.slurm_cluster import INSTALL, is_installed, slurm_of

pytestmark = pytest.mark.slow
DEADLINE = 240.0
SETTINGS = (
    "layout.workers=0",
    "cluster.interface=127.0.0.1",
    "cluster.threads_per_worker=1",
    "cluster.beat_seconds=0.5",
    "cluster.settle_seconds=0.5",
)


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return prepared(tmp_path)


def finished(
    *commands: Sequence[str | Path], environ: Mapping[str, str] = os.environ
) -> list[Outcome]:
    """Run commands at once; return how each ended."""
    environ = {**environ, "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [str(word) for word in command],
            env=environ,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for command in commands
    ]
    ended = []
    try:
        for process in started:
            out, err = process.communicate(timeout=DEADLINE)
            ended.append(Outcome(process.returncode, out, err))
    finally:
        for process in started:
            process.kill()
    return ended


def torchrun(node: int, port: int, *arguments: str | Path) -> list[str | Path]:
    """The command of one of two nodes."""
    program = Path(sys.executable).parent / "torchrun"
    where = ["--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", str(port)]
    many = ["--nnodes", "2", "--nproc-per-node", "2"]
    return [program, *many, *where, "-m", "holdfast", *arguments]


def free_port() -> int:
    with socket.socket() as asking:
        asking.bind(("127.0.0.1", 0))
        return int(asking.getsockname()[1])


def assert_same_parameters(run_file: Path, folder: Path) -> None:
    """Compare with a run of `holdfast train` alone."""
    alone = run_file.parent / "alone"
    apart("train", run_file, f"folder={alone}", *SETTINGS, "layout.workers=2").succeeds()
    apart("checkpoint", "diff", f"{alone}@newest", f"{folder}@newest").succeeds()


def test_torchrun_with_two_nodes_of_two_processes(run_file: Path) -> None:
    port, folder = free_port(), run_file.parent / "run"
    ended = finished(*(torchrun(n, port, "train", run_file, *SETTINGS) for n in (0, 1)))
    assert [each.code for each in ended] == [0, 0], ended[0].err + ended[1].err
    nodes = Nodes(run_file, folder)
    assert max(nodes.losses()) == 6
    assert {name[-2:] for name in nodes.nodes(nodes.newest)} == {"-0", "-1"}
    assert_same_parameters(run_file, folder)


def test_torchrun_whose_number_of_processes_is_not_the_run_files(run_file: Path) -> None:
    port = free_port()
    command = ("train", run_file, *SETTINGS, "layout.workers=2")
    for ended in finished(*(torchrun(node, port, *command) for node in (0, 1))):
        assert ended.code != 0
        assert "layout.workers is 2, and torchrun says 4; leave it out, or use 4" in ended.err
        assert "exitcode  : 2" in ended.err


def test_mpirun(run_file: Path) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("needs mpirun: apt-get install openmpi-bin")
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "4"]
    command = [*mpirun, sys.executable, "-m", "holdfast", "train", run_file, *SETTINGS]
    (ended,) = finished(command)
    assert ended.code == 0, ended.err
    assert ended.err.count("finished; the report") == 1, "one agent for four processes"
    assert_same_parameters(run_file, run_file.parent / "run")


@pytest.mark.skipif(not is_installed(), reason=INSTALL)
def test_srun(run_file: Path) -> None:
    with slurm_of(2) as cluster:
        train = (sys.executable, "-m", "holdfast", "train", run_file, *SETTINGS)
        command = ("srun", "-N", "2", "-n", "4", *train)
        (ended,) = finished(command, environ=cluster.environment)
        assert ended.code == 0, ended.err
        (refused,) = finished((*command, "layout.workers=3"), environ=cluster.environment)
        assert refused.code == 2
        assert "layout.workers is 3, and srun says 4" in refused.err
    nodes = Nodes(run_file, run_file.parent / "run")
    assert nodes.nodes(nodes.newest) == {"n1", "n2"}
    assert_same_parameters(run_file, nodes.folder)
