"""A Ray of this user: a head without CPUs, and a raylet for each node, at an address of its own.

No address is 127.0.0.1: Ray takes another one of the machine in its place, and waits without an
end. The settings find a lost node within seconds.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib import import_module

from holdfast.elastic.notices.ray_probe import use_token
from holdfast.errors import UserError
from holdfast_platform.clusters.cluster import ClusterState, Daemon, free_ports, is_port_open

HEAD_HOST = "127.0.0.2"
FIRST_NODE = 10
"""Node n1 is at 127.0.0.10, n2 at 127.0.0.11."""
_STORE_BYTES = 80 * 2**20
_ANSWER_S = 10.0
_START = "import sys; from ray.scripts.scripts import main; sys.exit(main())"
_SETTINGS = {
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "5",
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_gcs_storage": "rocksdb",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "3600",
}
"""The tables of the head are on the disk, so raylets and actors outlive it, for an hour at most.
By Ray's own default they end a minute after the head, and with them the run."""


class RayKind:
    """Implements `DisposableCluster`."""

    head = "head"
    nodes_outlive_head = True
    starting_nodes = max(2, (os.cpu_count() or 1) // 2)
    who_may_use = (
        "any account of this machine can use this cluster, unless you have a token of Ray "
        "(ray get-auth-token)"
    )

    def check(self) -> None:
        if importlib.util.find_spec("ray") is None:
            raise UserError(
                "ray cannot be imported here",
                where="--kind ray",
                remedy="install it with: pip install 'holdfast[ray]'",
            )
        use_token()  # for the daemons, too, which inherit it

    def write_config(self, state: ClusterState) -> None:
        """Ray takes all of it from its command line. A head that was lost has left a note, and
        Ray would take the raylets for that head."""
        if not is_port_open(HEAD_HOST, state.ports[self.head]):
            (state.folder / self.head / "ray_current_cluster").unlink(missing_ok=True)

    def daemons(self, state: ClusterState) -> list[Daemon]:
        host, address = HEAD_HOST, self._address(state)
        head = _daemon(
            state,
            self.head,
            *("--head", f"--port={state.ports[self.head]}", f"--node-ip-address={host}"),
            *("--num-cpus=0", "--include-dashboard=false", "--no-monitor"),
            f"--ray-client-server-port={free_ports(['client'])['client']}",
        )
        nodes = [
            _daemon(
                state,
                node,
                *(f"--address={address}", f"--node-ip-address=127.0.0.{FIRST_NODE + number}"),
                f"--num-cpus={state.cpus}",
            )
            for number, node in enumerate(state.node_names)
        ]
        return [head, *nodes]

    def is_head_ready(self, state: ClusterState) -> bool:
        port = state.ports[self.head]
        return is_port_open(HEAD_HOST, port) and self.head in self._alive(state)

    def usable_nodes(self, state: ClusterState) -> int:
        return len(self._alive(state) & set(state.node_names))

    def _alive(self, state: ClusterState) -> set[str]:
        client = import_module("ray._raylet").GcsClient(address=self._address(state))
        alive = import_module("ray.core.generated.gcs_pb2").GcsNodeInfo.ALIVE
        found = client.get_all_node_info(timeout=_ANSWER_S).values()
        return {each.node_name for each in found if each.state == alive}

    def variable(self, state: ClusterState) -> tuple[str, str]:
        return "RAY_ADDRESS", self._address(state)

    def _address(self, state: ClusterState) -> str:
        return f"{HEAD_HOST}:{state.ports[self.head]}"


def _daemon(state: ClusterState, name: str, *options: str) -> Daemon:
    command = [sys.executable, "-c", _START, "start", "--block", *options]
    command += [
        f"--node-name={name}",
        # Raylets that share a folder and start together may take the same names of sockets.
        f"--temp-dir={state.folder}/{name}",
        f"--object-store-memory={_STORE_BYTES}",
        "--disable-usage-stats",
        "--include-log-monitor=false",
        "--dashboard-agent-listen-port=0",
        "--min-worker-port=0",
        "--max-worker-port=0",
    ]
    settings = _SETTINGS | {"RAY_gcs_storage_path": f"{state.folder}/gcs"}
    environ = {key: value for key, value in settings.items() if key not in os.environ}
    return Daemon(name, tuple(command), environ)
