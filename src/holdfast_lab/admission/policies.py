"""Four ways to admit the same jobs under the same quotas, and the fourth with elastic jobs. Pure.

pods       each pod for itself, as a scheduler without groups does
gang       all pods of a job or none (Kueue, Volcano, coscheduling)
topology   gang, with the pods as near to each other as they fit
backfill   topology, with a reservation for the first job that must wait; later jobs may pass
           it if they end before (EASY, Lifka 1995). Victims are those that lose least
elastic    backfill; elastic jobs begin on fewer pods, shrink before any job is evicted, and
           grow when there is room and the step becomes shorter
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import inf
from random import Random
from typing import Protocol

from holdfast_lab.admission.board import Board, JobState, Phase
from holdfast_lab.admission.preemption import Preemption, add_near, carry_out, pack, spread

GROW_GAIN_RESIZES = 2.0  # A job grows if that saves at least so many times the pause of the change

_NEWEST = Preemption()
_CHEAPEST = Preemption(is_cheapest_first=True)


class Admission(Protocol):
    """Decides after each event. It acts through the board alone."""

    @property
    def name(self) -> str: ...
    def admit(self, board: Board, draw: Random) -> None: ...


@dataclass(frozen=True)
class PodByPod:
    """Pods are tried in the order of priority, and at random within one priority. Pods without a
    place come back from their back-off in no order (kube-scheduler). A pod keeps its devices while
    its group is incomplete."""

    name: str = "pods"
    preemption: Preemption = _NEWEST

    def admit(self, board: Board, draw: Random) -> None:
        states = [each for each in board.active.values() if each.phase is Phase.GATHERING]
        pods = [
            (-state.job.priority, draw.random(), state.number, state)
            for state in (*states, *board.queue())
            for _ in range(state.job.pods - len(state.nodes))
        ]
        hopeless: set[tuple[str, int, int]] = set()
        for *_, state in sorted(pods, key=lambda pod: pod[:3]):
            kind = (state.job.team, state.job.devices, state.job.priority)
            if kind not in hopeless and not self._place(board, state, draw):
                hopeless.add(kind)

    def _place(self, board: Board, state: JobState, draw: Random) -> bool:
        devices = state.job.devices

        def place(free: Sequence[int]) -> list[int] | None:
            return spread(free, 1, devices, draw)

        nodes = place(board.free) if board.may_use(state.job.team, devices) else None
        if nodes is None:
            releases = self.preemption.make_room(board, state, devices, place)
            if releases is None:
                return False
            carry_out(board, releases)
            nodes = place(board.free)
        if nodes is None:
            return False
        board.place_pod(state, nodes[0])
        return True


@dataclass(frozen=True)
class Gang:
    """All pods at once or none, in the order of the queue; a job that does not fit is passed
    (Kueue: BestEffortFIFO). is_near: the pods stand together."""

    name: str = "gang"
    is_near: bool = False
    preemption: Preemption = _NEWEST

    def admit(self, board: Board, draw: Random) -> None:
        hopeless: set[tuple[str, int, int, int]] = set()
        for state in board.queue():
            job = state.job
            kind = (job.team, job.pods, job.devices, job.priority)
            if kind not in hopeless and not self._start(board, state, draw):
                hopeless.add(kind)

    def _start(self, board: Board, state: JobState, draw: Random) -> bool:
        job = state.job

        def place(free: Sequence[int]) -> list[int] | None:
            if self.is_near:
                return pack(board.fabric, free, job.pods, job.devices)
            return spread(free, job.pods, job.devices, draw)

        return start_or_reclaim(board, state, job.size, place, self.preemption)


@dataclass(frozen=True)
class Backfill:
    """The first job for which there is no room gets a reservation. It names the nodes that the job
    will have, and when, by the estimates of running jobs. is_elastic: see the module."""

    name: str = "backfill"
    is_elastic: bool = False
    preemption: Preemption = _CHEAPEST

    def admit(self, board: Board, draw: Random) -> None:
        reserved, at = frozenset[int](), inf
        hopeless: set[tuple[str, int, int, int]] = set()
        for state in board.queue():
            job = state.job
            kind = (job.team, job.pods, job.devices, job.priority)
            if kind in hopeless and not reserved:
                continue
            if self._start(board, state, reserved, at):
                continue
            hopeless.add(kind)
            if not reserved:
                reserved, at = reserve(board, state)
        if self.is_elastic:
            grow(board, reserved)

    def _start(self, board: Board, state: JobState, reserved: Collection[int], at: float) -> bool:
        job = state.job
        place = self._placer(board, state, job.pods, reserved, at)
        if start_or_reclaim(board, state, job.size, place, self.preemption):
            return True
        if not self.is_elastic:
            return False
        sizes = list(range(job.pods - 1, job.least_pods - 1, -1))
        for pods in sizes:
            if board.may_use(job.team, pods * job.devices):
                nodes = self._placer(board, state, pods, reserved, at)(board.free)
                if nodes is not None:
                    board.start(state, nodes)
                    return True
        if not sizes:
            return False
        place = self._placer(board, state, job.least_pods, reserved, at)
        size = job.least_pods * job.devices
        return start_or_reclaim(board, state, size, place, self.preemption)

    def _placer(
        self, board: Board, state: JobState, pods: int, reserved: Collection[int], at: float
    ) -> Callable[[Sequence[int]], list[int] | None]:
        end = board.now + board.rules.start_s + state.planned * state.job.pods / pods
        avoid = reserved if end > at else ()

        def place(free: Sequence[int]) -> list[int] | None:
            return pack(board.fabric, free, pods, state.job.devices, avoid)

        return place


def start_or_reclaim(
    board: Board,
    state: JobState,
    size: int,
    place: Callable[[Sequence[int]], list[int] | None],
    preemption: Preemption,
) -> bool:
    """Start a job where there is room, or make running jobs give it room."""
    nodes = place(board.free) if board.may_use(state.job.team, size) else None
    if nodes is None:
        releases = preemption.make_room(board, state, size, place)
        if releases is None:
            return False
        carry_out(board, releases)
        nodes = place(board.free)
    if nodes is None:
        return False
    board.start(state, nodes)
    return True


def reserve(board: Board, state: JobState) -> tuple[frozenset[int], float]:
    """The nodes that a waiting job will have, and when, if jobs end as their owners estimate."""
    free, used, job = list(board.free), dict(board.used), state.job
    for end, _, other in sorted((board.expected_end(s), s.number, s) for s in board.training()):
        for node in other.nodes:
            free[node] += other.job.devices
        used[other.job.team] -= other.held
        if board.may_use(job.team, job.least_pods * job.devices, used):
            nodes = pack(board.fabric, free, job.least_pods, job.devices)
            if nodes is not None:
                return frozenset(nodes), end
    return frozenset(), inf


def grow(board: Board, reserved: Collection[int]) -> None:
    """Give free devices to shrunk jobs, first to those that have the least part of their pods."""
    shrunk = [state for state in board.training() if len(state.nodes) < state.job.pods]
    shrunk.sort(key=lambda s: (-s.job.priority, len(s.nodes) / s.job.pods, s.number))
    for state in shrunk:
        nodes = _better_nodes(board, state, reserved)
        if nodes:
            board.resize(state, nodes)


def _better_nodes(board: Board, state: JobState, reserved: Collection[int]) -> list[int] | None:
    """More nodes with which the job is done earlier; None: there are none, or they are far."""
    job, step = state.job, state.step
    if step is None or board.now < state.ready_s:
        return None
    more = add_near(
        board.fabric, board.free, state.nodes, job.pods - len(state.nodes), job.devices, reserved
    )
    while more and not board.may_use(job.team, len(more) * job.devices):
        more.pop()
    best: list[int] | None = None
    least = step.seconds - GROW_GAIN_RESIZES * board.rules.resize_s / max(1.0, state.steps_left)
    for number in range(1, len(more) + 1):
        nodes = sorted((*state.nodes, *more[:number]))
        seconds = board.model.step(job, nodes).seconds
        if seconds < least:
            best, least = nodes, seconds
    return best


ELASTIC = Backfill("elastic", True, Preemption(shrinks=True, is_cheapest_first=True))
POLICIES: dict[str, Admission] = {
    policy.name: policy
    for policy in (PodByPod(), Gang(), Gang("topology", is_near=True), Backfill(), ELASTIC)
}
