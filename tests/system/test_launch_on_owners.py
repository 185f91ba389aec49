"""A run on the machines of each owner, with real agents, from `launch` to its last step."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import pytest

from holdfast.checkpoint.restore.catalog import list_commits, step_of
from holdfast.events import RunStopped, StepDone
from holdfast.launch.owners.owner import USER_STOP
from tests.support.commands import Outcome, apart
from tests.support.nodes import Nodes, prepared
from tests.support.ranks import wait_until
from tests.support.ray_cluster import needs_ray, ray_cluster
from tests.support.slurm_cluster import INSTALL, is_installed, slurm_of
from tests.support.sshd import HOSTS, Sshd, sshd

pytestmark = pytest.mark.slow
DEADLINE = 240.0
needs_slurm = pytest.mark.skipif(not is_installed(), reason=INSTALL)
SETTINGS = (
    "layout.workers=2",
    "cluster.beat_seconds=0.5",
    "cluster.settle_seconds=0.5",
    "cluster.threads_per_worker=1",
    "cluster.min_nodes=2",
)


class LaunchedRun:
    """A run of a tiny model and the commands about it."""

    def __init__(self, root: Path) -> None:
        self.run_file, self.folder = prepared(root), root / "run"

    def __call__(self, command: str, *arguments: str) -> Outcome:
        return apart(command, self.run_file, *arguments, deadline=DEADLINE)

    def wait(self, state: str) -> None:
        def due() -> bool:
            nodes = json.loads(self("status", "--json").out)["nodes"]
            return {each["state"] for each in nodes} == {state}

        wait_until(due, DEADLINE, lambda: f"{state}\n{self('logs').out}")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[LaunchedRun]:
    made = LaunchedRun(tmp_path)
    yield made
    if (made.folder / "launch.json").exists():
        made("down")


def test_this_machine_as_the_owner(run: LaunchedRun) -> None:
    """With a spare. `down` saves the state of the last step, and a resume repeats none."""
    settings = (*SETTINGS, "cluster.places=1", "train.steps=100000", "checkpoint.every_steps=1000")
    started = run("launch", "--on", "local", "--nodes", "2", *settings, "launch.spares=1")
    assert started.code == 0, started.err
    nodes = Nodes(run.run_file, run.folder)
    deadline = time.monotonic() + DEADLINE
    while max(nodes.losses(), default=0) < 60:
        assert time.monotonic() < deadline, run("logs").out
    assert len(nodes.nodes(nodes.newest)) == 2
    ended = run("down")
    assert ended.code == 0, ended.err
    run.wait("finished")
    step = max(nodes.losses())
    assert step_of(list_commits(nodes.store)[0]) == step
    assert [e.reason for e in nodes.events(RunStopped)] == [USER_STOP]
    assert f"stopped by the user (holdfast down) at step {step:,} of" in run("status").out

    more = ("train.schedule.steps=100000", f"train.steps={step + 20}")
    resumed = run("launch", "--on", "local", "--nodes", "2", *settings, *more)
    assert resumed.code == 0, resumed.err
    followed = run("logs", "--follow")
    assert followed.code == 0
    run.wait("finished")
    done = [event.step for event in nodes.events(StepDone)]
    assert sorted(done) == list(range(1, step + 21)), "each step is done once"
    assert "this run is finished" in run("launch", *settings, *more).err


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Sshd]:
    with sshd(tmp_path / "sshd") as found:
        yield found


@contextmanager
def hosts_of_sshd(root: Path) -> Iterator[tuple[str, ...]]:
    with sshd(root) as found:
        yield ssh_settings(found)


def ssh_settings(server: Sshd) -> tuple[str, ...]:
    return (
        f"launch.ssh.hosts={json.dumps(HOSTS)}",
        f"launch.ssh.options={json.dumps(server.options)}",
        f"launch.ssh.python={sys.executable}",
        f"launch.ssh.folder={server.root}/homes",
        "launch.on=ssh",
        "launch.nodes=2",
        "cluster.places=1",
    )


def test_hosts_that_a_real_sshd_serves(run: LaunchedRun, server: Sshd) -> None:
    """The agents outlive the connections, leave on `down`, and a changed host key is named."""
    settings = (*SETTINGS, *ssh_settings(server), "train.steps=100000")
    started = run("launch", *settings)
    assert started.code == 0, started.err
    nodes = Nodes(run.run_file, run.folder)
    deadline = time.monotonic() + DEADLINE
    while max(nodes.losses(), default=0) < 20:
        assert time.monotonic() < deadline, run("logs").out
    assert nodes.nodes(nodes.newest) == set(HOSTS)
    assert "node 127.0.0.2" in run("logs", "--node", "127.0.0.2").out
    run.wait("running")
    assert run("down").code == 0
    run.wait("finished")

    server.change_host_key()
    run("launch", *settings).refuses_last("host 127.0.0.1", "its host key is not the one")
    lost = run("status")
    assert (lost.code, lost.out.count("lost")) == (1, 2)


# --- the same run file gives the same parameters on each owner ----------------------------------
def two_nodes(owner: str, *more: str) -> tuple[str, ...]:
    return (f"launch.on={owner}", "launch.nodes=2", "cluster.places=1", *more)


@contextmanager
def nodes_of_slurm(root: Path) -> Iterator[tuple[str, ...]]:
    with slurm_of(2) as cluster, pytest.MonkeyPatch.context() as patch:
        for variable in ("SLURM_CONF", "PATH"):
            patch.setenv(variable, cluster.environment[variable])
        yield two_nodes("slurm")


@contextmanager
def machines_of_ray(root: Path) -> Iterator[tuple[str, ...]]:
    with ray_cluster("a", "b") as cluster:
        yield two_nodes("ray", f"launch.ray.address={cluster.address}")


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(lambda root: nullcontext(two_nodes("local")), id="local"),
        pytest.param(lambda root: hosts_of_sshd(root / "sshd"), id="ssh"),
        pytest.param(nodes_of_slurm, id="slurm", marks=needs_slurm),
        pytest.param(machines_of_ray, id="ray", marks=needs_ray),
    ],
)
def test_the_same_run_file_gives_the_same_parameters(
    run: LaunchedRun, tmp_path: Path, way: Callable[[Path], AbstractContextManager[tuple[str, ...]]]
) -> None:
    """As `holdfast train` alone, bit for bit. torchrun, mpirun and srun: `test_launchers.py`.

    way: brings the owner up, and gives the overrides of `launch`."""
    apart(
        "train", run.run_file, f"folder={tmp_path}/alone", "cluster.threads_per_worker=1"
    ).succeeds()
    with way(tmp_path) as settings:
        started = run("launch", *SETTINGS, *settings)
        assert started.code == 0, started.err
        run.wait("finished")
    apart("checkpoint", "diff", f"{tmp_path}/alone@newest", f"{run.folder}@newest").succeeds()
    assert max(Nodes(run.run_file, run.folder).losses()) == 6
