"""This machine as an owner: N agents side by side, each a process of its own session.

For trying out a run of several nodes. The agents outlive the command that started them.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil

from holdfast.launch.owner import LaunchRequest, NodeState, NodeStatus, OwnedJob
from holdfast.wire.child_command import module_command

LOG_FOLDER = "launch"
_LAST_LINES = 1


class LocalOwner:
    """Implements `MachineOwner`. A job is the list of its processes, each as PID@START: a number
    alone may be another process's by now."""

    def describe(self, request: LaunchRequest) -> str:
        return "".join(f"{shlex.join(command)}\n" for _, command in _commands(request))

    def submit(self, request: LaunchRequest) -> OwnedJob:
        return self._started(request, OwnedJob("local", request.name, 0))

    def resize(self, job: OwnedJob, request: LaunchRequest) -> OwnedJob:
        """Start what is missing; ask the nodes with the highest numbers to leave."""
        wanted = {node for node, _ in _commands(request)}
        for node, process in job.details.items():
            if node not in wanted and (found := _alive(process)) is not None:
                found.send_signal(signal.SIGTERM)
        kept = {node: known for node, known in job.details.items() if node in wanted}
        return self._started(request, OwnedJob("local", job.job, job.nodes, kept))

    def status(self, job: OwnedJob) -> list[NodeStatus]:
        return [
            NodeStatus(node, NodeState.FINISHED)
            if _alive(process) is None
            else NodeStatus(node, NodeState.RUNNING, f"process {process.partition('@')[0]}")
            for node, process in job.details.items()
            if "@" in process
        ]

    def logs(self, job: OwnedJob, node: str) -> Iterator[str]:
        folder = Path(job.details["folder"])
        for name in [node] if node else [n for n, p in job.details.items() if "@" in p]:
            for line in (folder / f"{name}.log").read_text("utf-8", "replace").splitlines():
                yield line if node else f"{name}: {line}"

    def release(self, job: OwnedJob) -> None:
        for process in job.details.values():
            if (found := _alive(process)) is not None:
                found.send_signal(signal.SIGTERM)

    def _started(self, request: LaunchRequest, job: OwnedJob) -> OwnedJob:
        folder = request.folder / LOG_FOLDER
        folder.mkdir(exist_ok=True)
        details = dict(job.details) | {"folder": str(folder)}
        for node, command in _commands(request):
            if _alive(details.get(node, "")) is None:
                details[node] = _start(command, folder / f"{node}.log")
        return OwnedJob("local", job.job, request.all_nodes, details)


def _commands(request: LaunchRequest) -> Iterator[tuple[str, list[str]]]:
    for number in range(request.all_nodes):
        node = f"node-{number}"
        yield node, module_command("holdfast.cli.main", *request.join_arguments(node))


def _start(command: list[str], log: Path) -> str:
    """Start an agent that outlives this process; return PID@START."""
    with log.open("ab") as out:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
    return f"{child.pid}@{psutil.Process(child.pid).create_time()}"


def _alive(process: str) -> psutil.Process | None:
    """The process that PID@START names, if it lives."""
    number, _, started = process.partition("@")
    try:
        found = psutil.Process(int(number))
        if str(found.create_time()) == started and found.status() != psutil.STATUS_ZOMBIE:
            return found
    except (psutil.Error, ValueError):
        pass
    return None
