"""What Ray refuses, in one sentence and with exit code 2, on a real cluster."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commands import Outcome, apart
from tests.support.nodes import prepared
from tests.support.ray_cluster import RayCluster, needs_ray, ray_cluster

pytestmark = [pytest.mark.slow, needs_ray]


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
