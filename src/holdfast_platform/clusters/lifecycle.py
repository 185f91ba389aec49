"""Brings a disposable cluster up, mends it, and takes it down, whatever its kind."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from holdfast.errors import UserError
from holdfast_platform.clusters import processes
from holdfast_platform.clusters.cluster import (
    ClusterState,
    ClusterStates,
    Daemon,
    DisposableCluster,
    free_ports,
)

READY_S = 120.0
"""Seconds until all nodes have to be usable."""
_LOOK_S = 0.2
KINDS = ("ray", "slurm")
Progress = Callable[[int, int], None]
"""Called with the usable nodes, and with all of them."""


@dataclass(frozen=True)
class Ended:
    """What `take_down` found. left: processes that the kernel has not ended."""

    processes: int
    left: frozenset[psutil.Process]


def open_kind(kind: str) -> DisposableCluster:
    """Raises UserError for an unknown kind."""
    if kind == "ray":
        from holdfast_platform.clusters.ray import RayKind

        return RayKind()
    if kind == "slurm":
        from holdfast_platform.clusters.slurm import SlurmKind

        return SlurmKind()
    raise UserError(
        f"there is no kind of cluster {kind!r}", where="--kind", remedy=f"use {' or '.join(KINDS)}"
    )


class ClusterLifecycle:
    """One cluster's life. The note of it is written before each process is started, so `down`
    works after any end of `up`."""

    def __init__(self, kind: DisposableCluster, states: ClusterStates, progress: Progress) -> None:
        self._kind, self._states, self._progress = kind, states, progress

    def begin(self, wanted: ClusterState) -> ClusterState:
        """Start a new cluster in a folder of its own. Nothing of it is left after an error."""
        self._kind.check()
        # The path is short, since names of sockets are limited.
        folder = Path(tempfile.mkdtemp(prefix="hf-", dir="/tmp"))
        ports = free_ports([self._kind.head, *wanted.node_names])
        state = replace(wanted, folder=folder, ports=ports, processes={})
        try:
            self._states.write(state)
            return self._start(state)
        except BaseException:
            take_down(self._states, self._states.read(state.name) or state)
            raise

    def mend(self, state: ClusterState) -> ClusterState:
        """Start the daemons that have ended, at their old ports."""
        self._kind.check()
        head = self._kind.head
        if not self._kind.nodes_outlive_head and head not in processes.living(state):
            processes.end_all(state)
        alive = processes.living(state)
        kept = {name: each for name, each in state.processes.items() if name in alive}
        return self._start(replace(state, processes=kept))

    def _start(self, state: ClusterState) -> ClusterState:
        deadline = time.monotonic() + READY_S
        self._kind.write_config(state)
        head, *nodes = self._kind.daemons(state)
        state = self._start_one(state, head)
        while not self._kind.is_head_ready(state):
            self._wait(state, deadline, 0)
        for number, node in enumerate(nodes):
            state = self._start_one(state, node)
            is_last = node is nodes[-1]
            least = state.nodes if is_last else number + 2 - self._kind.starting_nodes
            while (usable := self._kind.usable_nodes(state)) < least:
                self._progress(usable, state.nodes)
                self._wait(state, deadline, usable)
        self._progress(state.nodes, state.nodes)
        return state

    def _start_one(self, state: ClusterState, daemon: Daemon) -> ClusterState:
        if daemon.name in processes.living(state):
            return state
        process = processes.start(daemon, state.folder)
        state = replace(state, processes={**state.processes, daemon.name: process})
        self._states.write(state)
        return state

    def _wait(self, state: ClusterState, deadline: float, usable: int) -> None:
        """Raises UserError if a daemon has ended, or after the deadline."""
        for name in sorted(state.processes.keys() - processes.living(state)):
            raise UserError(
                f"{name} of cluster {state.name} has ended: {_last_line(state, name)}",
                where=f"--kind {state.kind}",
                remedy="mend what it says, and call the command again",
            )
        if time.monotonic() > deadline:
            raise UserError(
                f"{usable} of {state.nodes} nodes are usable after {READY_S:.0f} s",
                where="--nodes",
                remedy="ask for fewer nodes",
            )
        time.sleep(_LOOK_S)


def take_down(states: ClusterStates, state: ClusterState) -> Ended:
    """End all processes of a cluster, remove its folder, and its note if nothing is left."""
    count, left = processes.end_all(state)
    if not left:
        with suppress(FileNotFoundError):
            shutil.rmtree(state.folder)
        states.remove(state.name)
    return Ended(count, frozenset(left))


def _last_line(state: ClusterState, name: str) -> str:
    with suppress(OSError):
        text = (state.folder / f"{name}.log").read_text("utf-8", "replace")
        if lines := text.strip().splitlines():
            return lines[-1].strip().rstrip(".")
    return "it has printed nothing"
