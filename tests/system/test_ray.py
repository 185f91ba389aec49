"""A run on a real Ray: machines are lost, drained, returned, brought and removed by its autoscaler.
The parameters are bit for bit those of one undisturbed process. What Ray refuses, in one sentence
and with exit code 2, on a real cluster."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.events import NoticeReceived
from tests.support.commands import Outcome, apart
from tests.support.nodes import prepared
from tests.support.ray_autoscaler import autoscaled_cluster
from tests.support.ray_cluster import RayCluster, needs_ray, ray_cluster
from tests.support.ray_run import ENDLESS, RayRun

pytestmark = [pytest.mark.slow, needs_ray]
ALL = {"node-0", "node-1", "node-2", "node-3"}


def test_machines_that_come_and_go_change_no_bit(tmp_path: Path) -> None:
    with ray_cluster("a", "b", "c", "d") as cluster:
        run = RayRun(tmp_path, cluster)
        run.launch(4, ENDLESS)
        run.first_step(0, ALL)

        lost, before = run.node_at(cluster.host("b")), run.generation
        cluster.lose("b")
        run.first_step(before, ALL - {lost})
        run.wait(lambda: run.states()[lost][0] == "waiting", "the lost node does not wait")
        before = run.generation
        cluster.add("b")
        run.first_step(before, ALL)
        assert run.node_at(cluster.host("b")) == lost, "it returns on the machine that came back"

        drained, before = run.node_at(cluster.host("c")), run.generation
        deadline = time.time() + 60
        cluster.drain("c", 60)
        assert run.first_step(before, ALL - {drained}) < deadline
        (notice,) = run.journal.events(NoticeReceived)
        assert (notice.nodes, notice.source) == ([drained], "ray: the node is drained")
        run.wait(lambda: run.states()[drained][0] == "waiting", "Ray is not asked for a machine")
        before = run.generation
        cluster.add("e")
        assert run.first_step(before, ALL) < deadline, "it returns before its machine is taken"
        assert run.node_at(cluster.host("e")) == drained
        run.wait_more_steps()

        assert run.command("down").code == 0
        assert {state for state, _ in run.states().values()} == {"finished"}
        steps = run.step + 20
        run.launch(4, f"train.steps={steps}")
        run.check_end(steps)
        assert "finished after step" in run.command("logs").out


def test_the_autoscaler_grows_and_shrinks_the_run(tmp_path: Path) -> None:
    two, three = {"node-0", "node-1"}, {"node-0", "node-1", "node-2"}
    autoscaled = (ENDLESS, "launch.ray.autoscaler=true", "cluster.gather_seconds=1")
    with autoscaled_cluster(3) as cluster:
        run = RayRun(tmp_path, cluster, workers=3)
        assert cluster.machines == 0
        run.launch(2, *autoscaled)
        run.first_step(0, two)
        assert cluster.machines == 2, "it has brought as many as the run wants"

        before = run.generation
        run.launch(3, *autoscaled)
        run.first_step(before, three)
        assert cluster.machines == 3

        before = run.generation
        cluster.lose_newest()
        lost = run.first_step(before, two)
        assert run.first_step(before, three) > lost, "another machine takes its place"

        before = run.generation
        run.launch(2, *autoscaled)
        run.first_step(before, two)
        run.wait(lambda: cluster.machines == 2, "the machine that is not needed stays")

        assert run.command("down").code == 0
        run.wait(lambda: cluster.machines == 0, "machines stay without a run", looks=False)
        steps = run.step + 20
        run.launch(2, *autoscaled[1:], f"train.steps={steps}")
        run.check_end(steps)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster() as made:
        made.add("a", "b", cpus=4)
        yield made


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return prepared(tmp_path)


def launch(run_file: Path, address: str, *settings: str) -> Outcome:
    return apart(
        *("launch", run_file, "--on", "ray", "--nodes", "2", "cluster.places=1"),
        *(f"launch.ray.address={address}", *settings),
        deadline=180,
    )


def test_what_the_machines_do_not_have(run_file: Path, cluster: RayCluster) -> None:
    done = launch(run_file, cluster.address, "launch.ray.cpus=8", "launch.ray.gpus=1")
    done.refuses_last("no machine of the Ray cluster", "GPU: 1", "the most of each: CPU: 4, GPU: 0")


def test_nodes_that_would_share_a_machine(run_file: Path, cluster: RayCluster) -> None:
    done = launch(run_file, cluster.address, "launch.ray.cpus=2")
    done.refuses_last("would share a machine", "CPU: 2", "launch.ray.groups to run")


def test_a_process_that_cannot_start(run_file: Path, cluster: RayCluster) -> None:
    lacks = "launch.ray.runtime_env={py_executable: /nowhere/python}"
    done = launch(run_file, cluster.address, "launch.ray.cpus=4", lacks)
    done.refuses_last("Ray cannot start a process of holdfast", "launch.ray.runtime_env")
    again = launch(run_file, cluster.address, "launch.ray.cpus=4")
    assert again.code == 0, again.err
    assert apart("down", run_file, deadline=180).code == 0


def test_a_job_that_is_not_over(run_file: Path, cluster: RayCluster) -> None:
    steps = ("launch.ray.cpus=4", "train.steps=100000")
    assert launch(run_file, cluster.address, *steps).code == 0
    (run_file.parent / "run" / "launch.json").rename(run_file.parent / "kept.json")
    launch(run_file, cluster.address, *steps).refuses_last("has nodes of this run already")
    (run_file.parent / "kept.json").rename(run_file.parent / "run" / "launch.json")
    assert apart("down", run_file, deadline=180).code == 0


def test_addresses_where_no_ray_is(run_file: Path) -> None:
    with socket.create_server(("127.0.0.2", 0)) as mute:
        address = f"127.0.0.2:{mute.getsockname()[1]}"
        done = launch(run_file, address, "launch.ray.cpus=4")
        done.refuses_last(f"what answers at {address} is no head of a Ray cluster")
    done = launch(run_file, address, "launch.ray.cpus=4")
    done.refuses_last(f"no Ray cluster answers at {address}")


def test_another_version_of_ray(run_file: Path, cluster: RayCluster, tmp_path: Path) -> None:
    """The client here says that it is another version."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import sys\n"
        "if sys.orig_argv[-1] == 'holdfast.launch.owners.ray.job':\n"
        "    import ray\n"
        "    ray.__version__ = '2.1.0'\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path / "site"))
        done = launch(run_file, cluster.address, "launch.ray.cpus=4")
    done.refuses_last("another Ray or Python than this machine", "2.1.0")
