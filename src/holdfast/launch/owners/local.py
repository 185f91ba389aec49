"""This machine as an owner: N agents side by side, each a process of its own session.

For trying out a run of several nodes. The agents outlive the command that started them. They listen
on the loopback address, so a laptop that changes its network keeps its run.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from holdfast.errors import ConfigError
from holdfast.launch.node.addresses import refuse_foreign_address
from holdfast.launch.owners.node_process import NodeProcess
from holdfast.launch.owners.owner import LaunchRequest, NodeStatus, OwnedJob, chosen_nodes
from holdfast.wire.child_command import module_command

LOG_FOLDER = "launch"
_FOLDER = "folder"
INTERFACE = "cluster.interface="


class LocalOwner:
    """Implements `MachineOwner`. A job's details are its folder of logs, and its processes by the
    names of the nodes."""

    def describe(self, request: LaunchRequest) -> str:
        return "".join(f"{shlex.join(command)}\n" for _, command in _commands(request))

    def check(self, request: LaunchRequest) -> None:
        cluster = request.config.cluster
        if cluster.metrics_port and request.all_nodes > 1:
            raise ConfigError(
                f"all {request.all_nodes} nodes are on this machine, and one of them alone gets "
                f"the port {cluster.metrics_port}",
                where="cluster.metrics_port",
                remedy="use 0; holdfast doctor RUN names the port of each node",
            )
        refuse_foreign_address(cluster)

    def submit(self, request: LaunchRequest) -> OwnedJob:
        return self._started(request, {})

    def resize(self, job: OwnedJob, request: LaunchRequest) -> OwnedJob:
        """Start what is missing; ask the nodes with the highest numbers to leave."""
        self.check(request)
        wanted = {node for node, _ in _commands(request)}
        kept = {}
        for each in _processes(job):
            if each.node in wanted:
                kept[each.node] = each
            else:
                each.leave()
        return self._started(request, kept)

    def status(self, job: OwnedJob) -> list[NodeStatus]:
        return [each.status() for each in _processes(job)]

    def logs(self, job: OwnedJob, node: str) -> Iterator[str]:
        processes = {each.node: each for each in _processes(job)}
        for name in chosen_nodes(list(processes), node):
            for line in processes[name].lines():
                yield line if node else f"{name}: {line}"

    def release(self, job: OwnedJob) -> None:
        for each in _processes(job):
            each.leave()

    def _started(self, request: LaunchRequest, kept: dict[str, NodeProcess]) -> OwnedJob:
        folder = request.folder / LOG_FOLDER
        details = {_FOLDER: str(folder)}
        for node, command in _commands(request):
            known = kept.get(node)
            if known is None or not known.is_alive:
                known = NodeProcess.start(node, command, folder)
            details[node] = known.process
        return OwnedJob("local", request.name, request.all_nodes, details)


def _commands(request: LaunchRequest) -> Iterator[tuple[str, list[str]]]:
    is_set = any(each.startswith(INTERFACE) for each in request.overrides)
    own = () if is_set else (f"{INTERFACE}127.0.0.1",)
    for number in range(request.all_nodes):
        node = f"node-{number}"
        yield node, module_command("holdfast.cli.main", *request.join_arguments(node, *own))


def _processes(job: OwnedJob) -> list[NodeProcess]:
    folder = Path(job.details[_FOLDER])
    return [NodeProcess(n, folder, p) for n, p in job.details.items() if n != _FOLDER]
