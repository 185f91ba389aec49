"""A real Ray cluster of several machines on this one: a raylet for each, at 127.0.0.10 and up.

Needs `pip install 'holdfast[ray]'` in the environment of the tests; `needs_ray` skips without it.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

HEAD = "127.0.0.2"
"""Not 127.0.0.1: Ray would take another address of the machine instead, and wait for ever."""
STORE_BYTES = 80 * 2**20
SETTINGS = {
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "5",
    "RAY_health_check_initial_delay_ms": "0",
}
"""A lost machine is seen after some seconds, also where the tests are busy."""

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="needs: pip install 'ray[default,train]'"
)


class RayCluster:
    """Machines by name. The head has no CPUs, so no node of a run is placed there."""

    def __init__(self, folder: str) -> None:
        cluster_utils = import_module("ray.cluster_utils")
        self._next_host = 10
        self._cluster: Any = cluster_utils.Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0,
                "object_store_memory": STORE_BYTES,
                "include_dashboard": False,
                "node_ip_address": HEAD,
                "temp_dir": folder,
            },
        )
        self.machines: dict[str, Any] = {}

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self, *names: str, cpus: int = 1) -> None:
        for name in names:
            self.machines[name] = self._cluster.add_node(
                wait=False,
                num_cpus=cpus,
                object_store_memory=STORE_BYTES,
                node_name=name,
                node_ip_address=f"127.0.0.{self._next_host}",
            )
            self._next_host += 1
        for name in names:
            self._cluster._wait_for_node(self.machines[name], 60)

    def host(self, name: str) -> str:
        return str(self.machines[name].node_ip_address)

    def machine_at(self, host: str) -> str:
        return next(name for name in self.machines if self.host(name) == host)

    def lose(self, name: str) -> None:
        """Kill everything of Ray on a machine; what its processes started ends with them."""
        self._cluster.remove_node(self.machines.pop(name), allow_graceful=False)

    def drain(self, name: str, seconds: float) -> None:
        """Announce that a machine will be taken away, as a cloud's provider does."""
        reason = import_module("ray.core.generated.autoscaler_pb2").DrainNodeReason
        client = import_module("ray._raylet").GcsClient(address=self.address)
        is_accepted, why = client.drain_node(
            self.machines[name].node_id,
            reason.DRAIN_NODE_REASON_PREEMPTION,
            "spot reclaim",
            int((time.time() + seconds) * 1000),
        )
        assert is_accepted, why

    def close(self) -> None:
        self._cluster.shutdown()


@contextmanager
def ray_cluster(*machines: str) -> Iterator[RayCluster]:
    """Run a cluster; no process of it is left afterwards."""
    folder = tempfile.mkdtemp(prefix="hfray-", dir="/tmp")  # short: names of sockets are limited
    # Ray writes the address into its own folder, which a machine that never ran Ray lacks.
    settings = SETTINGS | {"RAY_TMPDIR": folder}
    Path(folder, "ray").mkdir()
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    cluster = RayCluster(folder)
    try:
        cluster.add(*machines)
        yield cluster
    finally:
        cluster.close()
        shutil.rmtree(Path(folder), ignore_errors=True)
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
