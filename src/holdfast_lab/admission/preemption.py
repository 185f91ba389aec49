"""Places of pods, and devices that a job may take from running jobs. Pure.

The rules are Kueue's (ClusterQueue preemption: reclaimWithinCohort Any, withinClusterQueue
LowerPriority). A job that stays within its team's nominal quota takes devices from teams that
borrow. A job of higher priority takes them from its own team's jobs of lower priority. Victims are
found one by one, and those that turn out not to be needed are spared.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

from holdfast_lab.admission.board import Board, JobState
from holdfast_lab.admission.fabric import Fabric


def spread(free: Sequence[int], pods: int, devices: int, draw: Random) -> list[int] | None:
    """Nodes of so many pods, each on a node with most devices free (Kubernetes: LeastAllocated),
    at random among equals. None: they do not all fit."""
    room = list(free)
    chosen: list[int] = []
    for _ in range(pods):
        most = max(room)
        if most < devices:
            return None
        node = draw.choice([number for number, left in enumerate(room) if left == most])
        room[node] -= devices
        chosen.append(node)
    return sorted(chosen)


def pack(
    fabric: Fabric, free: Sequence[int], pods: int, devices: int, avoid: Collection[int] = ()
) -> list[int] | None:
    """Nodes of so many pods, as near to each other as they fit. None: they do not all fit.

    The smallest sufficient rack is taken. If there is none, the pods take few racks of the
    smallest sufficient zone, or at last few racks of all (Kueue: topology, preferred). In a rack
    the fullest nodes come first, so that empty ones stay empty. avoid: nodes that are kept
    for another job.
    """
    if sum(free) < pods * devices:
        return None
    slots = [0 if n in avoid else left // devices for n, left in enumerate(free)]
    rack_slots = [sum(slots[n] for n in rack) for rack in fabric.racks]
    fitting = [rack for rack, number in enumerate(rack_slots) if number >= pods]
    if fitting:
        rack = min(fitting, key=lambda r: (rack_slots[r], _fullest(free, fabric.racks[r], slots)))
        return _fill([rack], fabric, free, slots, pods)
    zone_slots = [sum(rack_slots[r] for r in zone) for zone in fabric.zones]
    zones = [zone for zone, number in enumerate(zone_slots) if number >= pods]
    if zones:
        racks = list(fabric.zones[min(zones, key=lambda z: zone_slots[z])])
    elif sum(zone_slots) >= pods:
        order = sorted(range(len(zone_slots)), key=lambda z: -zone_slots[z])
        racks = [rack for zone in order for rack in fabric.zones[zone]]
        return _fill(racks, fabric, free, slots, pods)
    else:
        return None
    racks.sort(key=lambda r: -rack_slots[r])
    return _fill(racks, fabric, free, slots, pods)


def add_near(
    fabric: Fabric,
    free: Sequence[int],
    nodes: Sequence[int],
    more: int,
    devices: int,
    avoid: Collection[int] = (),
) -> list[int]:
    """Up to `more` further nodes for a job: of its racks, then of its zones, then any."""
    racks, zones = fabric.racks_of(nodes), fabric.zones_of(nodes)
    usable = [node for node in fabric.nodes if free[node.number] >= devices]
    usable = [node for node in usable if node.number not in avoid]
    usable.sort(
        key=lambda n: (n.rack not in racks, n.zone not in zones, n.rack, free[n.number], n.number)
    )
    chosen: list[int] = []
    for node in usable:
        chosen += [node.number] * min(more - len(chosen), free[node.number] // devices)
    return chosen


def drop_far(fabric: Fabric, nodes: Sequence[int], number: int) -> list[int]:
    """The nodes that a job keeps if it gives so many pods back: those of its fullest racks."""
    counts: dict[int, int] = {}
    for node in nodes:
        rack = fabric.nodes[node].rack
        counts[rack] = counts.get(rack, 0) + 1
    ordered = sorted(nodes, key=lambda n: (-counts[fabric.nodes[n].rack], fabric.nodes[n].rack, n))
    return sorted(ordered[: len(nodes) - number])


def _fullest(free: Sequence[int], rack: Sequence[int], slots: Sequence[int]) -> int:
    return min(free[n] for n in rack if slots[n])


def _fill(
    racks: Sequence[int], fabric: Fabric, free: Sequence[int], slots: Sequence[int], pods: int
) -> list[int]:
    chosen: list[int] = []
    for rack in racks:
        for node in sorted(fabric.racks[rack], key=lambda n: (free[n], n)):
            chosen += [node] * min(slots[node], pods - len(chosen))
    return sorted(chosen)


# --- devices of running jobs ----------------------------------------------------------------------
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
