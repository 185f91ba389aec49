"""Processes of nodes whose trainer is not Holdfast, and the lines that their loops write."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from holdfast.launch.node.fleet import die_with_parent
from holdfast_lab.score.harness.trainer import NodeNetwork, Workplace
from holdfast_lab.score.record import Commit

READY_VARIABLE = "HOLDFAST_SCORE_READY"
"""As in `holdfast_lab.score.trainers.gate`, which is imported by processes of nodes alone."""
_STOP_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class _Parked:
    """A node that has not joined. ready: the file that its process makes."""

    process: subprocess.Popen[bytes]
    ready: Path


class NodeProcesses:
    """One process tree for each node, and helpers that no fault hits (a store, a lighthouse).

    A process that calls `holdfast_lab.score.trainers.gate.wait_at_gate` can be parked. It waits
    there until `start` lets its node join."""

    def __init__(
        self, folder: Path, environment: Mapping[str, str], network: NodeNetwork | None = None
    ) -> None:
        """network: of the nodes, and of the helpers."""
        self._folder, self._network = folder, network
        self._environment = {**os.environ, **environment}
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._helpers: list[subprocess.Popen[bytes]] = []
        self._parked: dict[str, deque[_Parked]] = {}
        self._parked_count = 0
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def alive(self) -> list[str]:
        return [name for name, process in self._nodes.items() if process.poll() is None]

    def park(self, node: str, command: Sequence[str], **environment: str) -> None:
        """Start a node that joins later."""
        self._parked_count += 1
        ready = self._folder.absolute() / f"ready-{self._parked_count}"
        inside = [] if self._network is None else self._network.command(node)
        variables = {**environment, READY_VARIABLE: str(ready)}
        process = self._start(node, [*inside, *command], variables)
        self._parked.setdefault(node, deque()).append(_Parked(process, ready))

    @property
    def ready(self) -> int:
        """How many parked nodes wait at their gates."""
        return sum(
            each.ready.exists() and each.process.poll() is None
            for parked in self._parked.values()
            for each in parked
        )

    def start(self, node: str, command: Sequence[str], *words: str, **environment: str) -> None:
        """Let a node join: one that was parked, or a new one if none was. words: for its gate."""
        if not self._parked.get(node):
            self.park(node, command, **environment)
        process = self._nodes[node] = self._parked[node].popleft().process
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.write(f"{' '.join(words)}\n".encode())
            process.stdin.flush()

    def start_helper(self, name: str, command: Sequence[str]) -> None:
        inside = [] if self._network is None else self._network.command()
        self._helpers.append(self._start(name, [*inside, *command], {}))

    def _start(
        self, name: str, command: Sequence[str], environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        with (self._folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**self._environment, **environment},
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )

    def tree(self, node: str) -> list[int]:
        """The node's process and all that it started."""
        process = self._nodes.get(node)
        return [] if process is None else process_tree(process.pid)

    def kill(self, node: str) -> None:
        process = self._nodes.pop(node, None)
        if process is not None:
            _kill(process)

    def stop(self) -> None:
        parked = [each.process for queue in self._parked.values() for each in queue]
        for process in [*self._nodes.values(), *parked, *self._helpers]:
            _kill(process)
        self._nodes, self._helpers, self._parked = {}, [], {}


def process_tree(pid: int) -> list[int]:
    """A process, first, and all that it started; none if it has ended."""
    with suppress(psutil.Error):
        root = psutil.Process(pid)
        return [pid, *(child.pid for child in root.children(recursive=True))]
    return []


def kill_tree(pid: int) -> None:
    """SIGKILL to a tree, its root first, so that nothing starts a child again."""
    for each in process_tree(pid):
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def _kill(process: subprocess.Popen[bytes]) -> None:
    kill_tree(process.pid)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_TIMEOUT_S)
    if process.stdin is not None:
        with suppress(BrokenPipeError):
            process.stdin.close()


class ParkedNodes:
    """Base of runs whose nodes are process trees that can be parked (`ParkingRun`).

    variables: of the environment of each node.
    """

    variables: Mapping[str, str] = {}

    def __init__(self, workplace: Workplace, folder: str = "nodes") -> None:
        self._at = workplace
        self._processes = NodeProcesses(
            workplace.folder / folder, workplace.environment(), workplace.network
        )
        self._reader = LineReader(workplace.folder / "lines")

    def _command(self, node: str) -> list[str]:
        raise NotImplementedError

    def park(self, nodes: Sequence[str]) -> None:
        for node in nodes:
            self._processes.park(node, self._command(node), **self.variables)

    def ready_nodes(self) -> int:
        return self._processes.ready

    def start(self, nodes: Sequence[str]) -> None:
        for node in nodes:
            self._processes.start(node, self._command(node), **self.variables)

    def kill(self, node: str) -> None:
        self._processes.kill(node)

    def warn(self, node: str, seconds: float) -> None:
        """Most trainers know no notices."""

    def worker_pids(self, node: str) -> list[int]:
        return self._processes.tree(node)

    def commits(self) -> list[Commit]:
        return self._reader.commits()

    def corrupt_checkpoint(self) -> bool:
        return False

    def stop(self) -> None:
        self._processes.stop()


def free_port() -> int:
    """A port that nothing listens at now."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


class LineReader:
    """Reads the file that loops write into (`holdfast_lab/score/trainers/workload.py`) as committed
    steps. A step is what its ranks did."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def commits(self) -> list[Commit]:
        """A step is committed when the first of its ranks has applied it."""
        groups: dict[tuple[int, int], list[dict[str, Any]]] = {}
        for row in self._rows():
            groups.setdefault((row["generation"], row["step"]), []).append(row)
        made = [self._commit(step, rows) for (_, step), rows in groups.items()]
        return sorted(made, key=lambda commit: (commit.t_s, commit.step))

    def _rows(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        lines = self._path.read_bytes().split(b"\n")[:-1]
        return [json.loads(line) for line in lines]

    @staticmethod
    def _commit(step: int, rows: list[dict[str, Any]]) -> Commit:
        ranges = sorted({(start, stop) for row in rows for start, stop in row["samples"]})
        tokens = sum(stop - start for start, stop in ranges)
        workers = max(row["workers"] for row in rows)
        loss = sum(row["loss"] for row in rows) / max(1, tokens)
        first = min(row["t"] for row in rows)
        return Commit(first, step, float(tokens), workers, loss, tuple(ranges))
