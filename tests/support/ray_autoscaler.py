"""A real Ray whose own autoscaler starts and ends machines: raylets on this one.

`ray.cluster_utils.AutoscalingCluster` does the same, but ends every Ray of this machine. This one
ends what it has started alone.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from tests.support.ranks import wait_until
from tests.support.ray_cluster import SETTINGS, STORE_BYTES

HEAD_ID = "f" * 51 + "00000"
IDLE_MINUTES = 0.1
EMPTY_LISTS = (
    "cluster_synced_files",
    "rsync_exclude",
    "rsync_filter",
    "initialization_commands",
    "setup_commands",
    "head_setup_commands",
    "worker_setup_commands",
    "head_start_ray_commands",
    "worker_start_ray_commands",
)
PROVIDER = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"
START_RAY = "import sys; from ray.scripts.scripts import main; sys.exit(main())"


class AutoscaledCluster:
    """A head without CPUs, and at most `most` machines of one CPU as the autoscaler wants."""

    def __init__(self, folder: Path, most: int) -> None:
        host = _address_of_this_machine()
        with socket.socket() as free:
            free.bind((host, 0))
            port = free.getsockname()[1]
        self.address, self.folder = f"{host}:{port}", folder
        config = folder / "cluster.json"
        config.write_text(json.dumps(self._config(most)))
        command = [sys.executable, "-c", START_RAY, "start", "--head", f"--port={port}"]
        started = subprocess.run(
            [
                *command,
                f"--autoscaling-config={config}",
                f"--temp-dir={folder}",
                f"--node-ip-address={host}",
                f"--object-store-memory={STORE_BYTES}",
                "--num-cpus=0",
                "--include-dashboard=false",
                "--disable-usage-stats",
                "--dashboard-agent-listen-port=0",
                "--min-worker-port=0",
                "--max-worker-port=0",
            ],
            env=os.environ
            | SETTINGS
            | {
                "AUTOSCALER_UPDATE_INTERVAL_S": "1",
                "RAY_FAKE_CLUSTER": "1",
                "RAY_enable_autoscaler_v2": "1",
                "RAY_CLOUD_INSTANCE_ID": HEAD_ID,
                "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
        )
        assert started.returncode == 0, started.stdout

    def _config(self, most: int) -> dict[str, Any]:
        machine = {"CPU": 1, "object_store_memory": STORE_BYTES}
        return {
            "cluster_name": "holdfast-tests",
            "max_workers": most,
            "provider": {
                "type": "external",  # Ray's wheel lacks a file that its "fake_multinode" needs
                "module": PROVIDER,
                "gcs_address": self.address,
                "head_node_id": HEAD_ID,
                "launch_multiple": True,
            },
            "head_node_type": "ray.head.default",
            "available_node_types": {
                "ray.head.default": {"resources": {}, "node_config": {}, "max_workers": 0},
                "machine": {
                    "resources": machine,
                    "node_config": {},
                    "min_workers": 0,
                    "max_workers": most,
                },
            },
            **{key: [] for key in EMPTY_LISTS},
            "file_mounts": {},
            "idle_timeout_minutes": IDLE_MINUTES,
            "upscaling_speed": 10.0,
        }

    @property
    def machines(self) -> int:
        """Those that run, without the head."""
        return len(self._raylets()) - 1

    def lose_newest(self) -> None:
        """Kill the raylet of a machine; what it has started ends with it."""
        self._raylets()[-1].kill()

    def _raylets(self) -> list[psutil.Process]:
        found = [p for p in self._processes() if "raylet/raylet" in " ".join(_command(p)[:1])]
        return sorted(found, key=lambda process: process.create_time())

    def _processes(self) -> list[psutil.Process]:
        mark = str(self.folder)
        return [p for p in psutil.process_iter() if any(mark in word for word in _command(p))]

    def close(self) -> None:
        known = {q.pid: q for p in self._processes() for q in (p, *_children(p))}

        def all_ended() -> bool:
            left = [p for p in (*known.values(), *self._processes()) if _runs(p)]
            for process in left:
                with suppress(psutil.Error):
                    process.kill()
            return not left

        wait_until(all_ended, what="the end of all processes of Ray", pause_s=0.1)


def _address_of_this_machine() -> str:
    """Return the address that Ray's nodes take by themselves."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("8.8.8.8", 80))
        return str(probe.getsockname()[0])


def _command(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):
        return process.cmdline()
    return []


def _children(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.Error):
        return process.children(recursive=True)
    return []


def _runs(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@contextmanager
def autoscaled_cluster(most: int) -> Iterator[AutoscaledCluster]:
    """Run a cluster; no process of it is left afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="hfray-", dir="/tmp"))
    cluster = AutoscaledCluster(folder, most)
    try:
        yield cluster
    finally:
        cluster.close()
        shutil.rmtree(folder, ignore_errors=True)
