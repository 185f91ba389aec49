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
from holdfast.launch.clusters.cluster import ClusterState, Daemon, is_port_open

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
}


class RayKind:
    """Implements `DisposableCluster`."""

    head = "head"
    nodes_outlive_head = False
    starting_nodes = 1
    """On two cores, nodes that started together have exceeded Ray's own limit of 30 s."""
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
        """Ray takes all of it from its command line."""

    def daemons(self, state: ClusterState) -> list[Daemon]:
        host, address = HEAD_HOST, self._address(state)
        head = _daemon(
            self.head,
            *("--head", f"--port={state.ports[self.head]}", f"--node-ip-address={host}"),
            *(
                "--num-cpus=0",
                "--node-name=head",
                "--include-dashboard=false",
                f"--temp-dir={state.folder}/ray",
            ),
        )
        nodes = [
            _daemon(
                node,
                *(f"--address={address}", f"--node-ip-address=127.0.0.{FIRST_NODE + number}"),
                *(f"--num-cpus={state.cpus}", f"--node-name={node}"),
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
        """Return the names of the nodes that Ray counts."""
        client = import_module("ray._raylet").GcsClient(address=self._address(state))
        alive = import_module("ray.core.generated.gcs_pb2").GcsNodeInfo.ALIVE
        found = client.get_all_node_info(timeout=_ANSWER_S).values()
        return {each.node_name for each in found if each.state == alive}

    def variable(self, state: ClusterState) -> tuple[str, str]:
        return "RAY_ADDRESS", self._address(state)

    def _address(self, state: ClusterState) -> str:
        return f"{HEAD_HOST}:{state.ports[self.head]}"


def _daemon(name: str, *options: str) -> Daemon:
    command = [sys.executable, "-c", _START, "start", "--block", *options]
    command += [
        f"--object-store-memory={_STORE_BYTES}",
        "--disable-usage-stats",
        "--dashboard-agent-listen-port=0",
        "--min-worker-port=0",
        "--max-worker-port=0",
    ]
    environ = {key: value for key, value in _SETTINGS.items() if key not in os.environ}
    return Daemon(name, tuple(command), environ)
