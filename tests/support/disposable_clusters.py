"""A disposable cluster named `try` of a real Slurm or Ray, by the real commands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

from holdfast_platform.clusters.cluster import ClusterState, ClusterStates
from holdfast_platform.clusters.lifecycle import take_down
from holdfast_platform.clusters.processes import all_of
from tests.support.commands import Outcome, apart

DEADLINE_S = 150.0


def up(kind: str, nodes: int, name: str = "try") -> Outcome:
    options = ("--kind", kind, "--nodes", str(nodes), "--cpus", "1")
    return apart("cluster", "up", name, *options, deadline=DEADLINE_S).succeeds()


def read(name: str = "try") -> ClusterState:
    state = ClusterStates().read(name)
    assert state is not None
    return state


def lose(state: ClusterState, name: str) -> None:
    """The machine of a raylet, or of the head, loses its power."""
    daemon = psutil.Process(int(state.processes[name].partition("@")[0]))
    for each in [*daemon.children(recursive=True), daemon]:
        with suppress(psutil.Error):
            each.kill()


def down(state: ClusterState) -> None:
    apart("cluster", "down", state.name, deadline=DEADLINE_S).succeeds()
    check_nothing_left(state)


def check_nothing_left(state: ClusterState) -> None:
    assert all_of(state) == set()
    assert not state.folder.exists()
    assert ClusterStates().read(state.name) is None


@contextmanager
def clusters_ended() -> Iterator[None]:
    """End what a test leaves."""
    states = ClusterStates()
    try:
        yield
    finally:
        for name in states.names():
            if state := states.read(name):
                take_down(states, state)
