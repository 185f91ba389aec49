"""Devices that a job may take from running jobs: reclaimed quotas, and those of own jobs. Pure.

The rules are Kueue's (ClusterQueue preemption: reclaimWithinCohort Any, withinClusterQueue
LowerPriority). A job that stays within its team's nominal quota takes devices from teams that
borrow. A job of higher priority takes them from its own team's jobs of lower priority. Victims are
found one by one, and those that turn out not to be needed are spared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from holdfast_lab.admission.board import Board, JobState
from holdfast_lab.admission.placing import drop_far

Place = Callable[[Sequence[int]], list[int] | None]


@dataclass(frozen=True)
class Release:
    """Nodes that a job keeps; none: it is evicted."""

    state: JobState
    nodes: tuple[int, ...]


@dataclass(frozen=True)
class Preemption:
    """shrinks: elastic jobs give pods back before any job is evicted. Those of the own team do so
    for a job of the same priority, too. is_cheapest_first: of jobs of one priority, those go first
    that lose least. Without it, the newest go first (Kueue)."""

    shrinks: bool = False
    is_cheapest_first: bool = False

    def make_room(
        self, board: Board, state: JobState, size: int, place: Place
    ) -> list[Release] | None:
        """Return what running jobs must release so that `size` devices of a job have a place. None:
        nothing that they may be asked to release would do."""
        trial = _Trial(board, state, size, place)
        others = self._victims(board, state, size)
        if sum(board.free) + sum(other.held for other in others) < size:
            return None
        for other, keeps in self._options(others):
            if trial.may_take(other, is_eviction=not keeps):
                trial.take(other, keeps)
                if trial.is_settled():
                    return trial.needed_releases()
        return None

    def _victims(self, board: Board, state: JobState, size: int) -> list[JobState]:
        """Jobs that could be asked at all, in the order in which they are."""
        job = state.job
        is_entitled = board.rules.reclaims and board.is_nominal(job.team, size)
        lower = job.priority + self.shrinks
        others = [
            each
            for each in board.active.values()
            if each is not state
            and (
                each.job.priority < lower
                if each.job.team == job.team
                else is_entitled and board.used[each.job.team] > board.teams[each.job.team].quota
            )
        ]
        if others and self.is_cheapest_first:
            board.settle()
        return sorted(others, key=lambda each: self._victim_key(each, state))

    def _options(self, others: Sequence[JobState]) -> Iterator[tuple[JobState, int]]:
        """(job, pods that it keeps), in the order in which they are asked."""
        if self.shrinks:
            for other in others:
                for pods in range(other.extra_pods):
                    yield other, len(other.nodes) - pods - 1
        for other in others:
            yield other, 0

    def _victim_key(self, other: JobState, state: JobState) -> tuple[bool, int, float, float, int]:
        cost = other.ledger.unsaved_device_s if self.is_cheapest_first else -other.placed_s
        is_own = other.job.team == state.job.team
        return is_own, other.job.priority, cost, -other.job.submit_s, other.number


def carry_out(board: Board, releases: Sequence[Release]) -> None:
    """Shrink and evict."""
    for release in releases:
        if release.nodes:
            board.resize(release.state, release.nodes)
        else:
            board.evict(release.state)


@dataclass
class _Trial:
    """Free devices and use by team if the jobs in `kept` had only those nodes."""

    board: Board
    state: JobState
    size: int
    place: Place
    free: list[int] = field(default_factory=list)
    used: dict[str, int] = field(default_factory=dict)
    kept: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.free, self.used = list(self.board.free), dict(self.board.used)

    def is_settled(self) -> bool:
        if sum(self.free) < self.size:
            return False
        may = self.board.may_use(self.state.job.team, self.size, self.used)
        return may and self.place(self.free) is not None

    def may_take(self, other: JobState, is_eviction: bool) -> bool:
        mine, theirs = self.state.job, other.job
        if self.kept.get(other.number) == []:
            return False
        if theirs.team == mine.team:
            is_lower = theirs.priority < mine.priority
            return is_lower or (not is_eviction and theirs.priority == mine.priority)
        is_entitled = self.board.is_nominal(mine.team, self.size, self.used)
        return is_entitled and self.used[theirs.team] > self.board.teams[theirs.team].quota

    def take(self, other: JobState, keeps: int) -> None:
        before = self.kept.get(other.number, other.nodes)
        nodes = drop_far(self.board.fabric, other.nodes, len(other.nodes) - keeps)
        self._move(other, before, nodes)
        self.kept[other.number] = nodes

    def needed_releases(self) -> list[Release]:
        """Spare each job without which the rest suffices, the last first."""
        states = {state.number: state for state in self.board.active.values()}
        for number in reversed(list(self.kept)):
            other, nodes = states[number], self.kept[number]
            self._move(other, nodes, other.nodes)
            if self.is_settled():
                del self.kept[number]
            else:
                self._move(other, other.nodes, nodes)
        return [Release(states[number], tuple(nodes)) for number, nodes in self.kept.items()]

    def _move(self, other: JobState, before: Sequence[int], after: Sequence[int]) -> None:
        for node in before:
            self.free[node] += other.job.devices
        for node in after:
            self.free[node] -= other.job.devices
        self.used[other.job.team] += (len(after) - len(before)) * other.job.devices
