"""The recovery plan between two generations: reuse the state that survivors of the last one hold.

The processes report what they hold (`policy.recovery.survivors`). The topology of some generation
lays out each state, usually that of the generation that just ended. If a recovery failed before any
state moved, it is an older topology, for some processes or for all. Processes continue live if
their states are of one generation: the newest one whose state is complete. The remaining processes
join as newcomers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.config.run import RunConfig
from holdfast.core.sharding.state_table import state_table
from holdfast.elastic.protocol.generation_record import PreviousState
from holdfast.layout import Topology
from holdfast.policy.recovery.rank_assignment import Seats, seats
from holdfast.policy.recovery.survivors import Held, Standpoint, standpoint, unheld

_REMEMBERED = 16  # topologies of older generations: no process holds a state for longer


@dataclass(frozen=True)
class Aftermath:
    """How the next generation begins. live: the resume point of its processes' own state, None if
    they cannot resume. why: the reason then. before: the topology that lays out this state."""

    seats: Seats
    live: Standpoint | None
    why: str
    before: Topology | None

    @property
    def stay(self) -> int:
        return sum(pid is not None for pid in self.seats.processes)

    @property
    def came_from(self) -> tuple[int | None, ...] | None:
        return self.seats.came_from if self.live is not None else None

    def told_before(self) -> PreviousState | None:
        """Return the previous state for the commands to newcomers; None without live state."""
        if self.live is None or self.before is None:
            return None
        return PreviousState(self.before, self.live.step)


class Survivors:
    """Memory of the topologies that lay out the processes' states."""

    def __init__(self, config: RunConfig) -> None:
        self._table = state_table(config.model, config.train.precision)
        self._topologies: dict[int, Topology] = {}

    def opened(self, topology: Topology) -> None:
        self._topologies[topology.generation] = topology
        for old in sorted(self._topologies)[:-_REMEMBERED]:
            del self._topologies[old]

    def plan(
        self, new: Topology, held: Mapping[int, Held], where: Mapping[int, str] | None = None,
        durable: int = 0,
    ) -> Aftermath:  # fmt: skip
        """Return how the next generation begins.

        `held`: the state of each surviving process. where: the node of each, if there are several.
        durable: the newest step that has a checkpoint. Processes with an older state were cut off
        while the run continued elsewhere, so their state does not count."""
        stood = self._stood(held)
        if isinstance(stood, str):
            why = stood
        elif stood.point.step < durable:
            why = f"there is a checkpoint of step {durable}, and they hold step {stood.point.step}"
        else:
            before, point = stood.before, stood.point
            living = _all_of(before, stood.processes, held, where)
            seated = seats(before, new, living, point.ranks)
            stay = {was for was in seated.came_from if was is not None}
            missing = unheld(before, self._table, stay & point.ranks)
            if missing is None:
                return Aftermath(seated, point, "", before)
            why = f"of the processes that hold parts of {missing}, not all have a place"
        return Aftermath(seats(new, new, _all_of(new, {}, held, where), ()), None, why, None)

    def whole(self, held: Mapping[int, Held], where: Mapping[int, str]) -> Whole | None:
        """Return the intact replicas, which can continue by themselves, or None.

        The result is None unless some replicas have lost a rank and some have not. Arguments as in
        `plan`."""
        stood = self._stood(held)
        if isinstance(stood, str):
            return None
        before, there = stood.before, stood.point.ranks
        replicas = [r for r in before.replicas if there.issuperset(r.ranks)]
        if not 0 < len(replicas) < len(before.replicas):
            return None
        places = Counter(where[stood.processes[rank]] for r in replicas for rank in r.ranks)
        return Whole(before, frozenset(range(before.world_size)) - there, places)

    def live(self, held: Mapping[int, Held]) -> bool:
        """Return True if these processes hold the complete state of some generation."""
        return not isinstance(self._stood(held), str)

    def _stood(self, held: Mapping[int, Held]) -> _Stood | str:
        """Return the newest generation whose state is complete, or why there is none."""
        why = "nobody is left who holds a state"
        stood = {one.state[0] for one in held.values() if one.state is not None}
        for generation in sorted(stood & self._topologies.keys(), reverse=True):
            before = self._topologies[generation]
            processes = {h.state[1]: pid for pid, h in held.items()
                         if h.state is not None and h.state[0] == generation}  # fmt: skip
            holding = {rank: held[pid] for rank, pid in processes.items()}
            found = standpoint(before, self._table, holding)
            if isinstance(found, Standpoint):
                return _Stood(before, processes, found)
            why = found
        return why


@dataclass(frozen=True)
class Whole:
    """The replicas of `before` that lost no rank. lost: the lost ranks. places: the number of these
    replicas' processes by node."""

    before: Topology
    lost: frozenset[int]
    places: Counter[str]


@dataclass(frozen=True)
class _Stood:
    """The holders of a generation's state. processes: the process of each rank."""

    before: Topology
    processes: Mapping[int, int]
    point: Standpoint


def _all_of(
    topology: Topology, processes: Mapping[int, int], held: Mapping[int, Held],
    where: Mapping[int, str] | None,
) -> dict[int, int]:  # fmt: skip
    """Return `processes` by rank, with the remaining processes at free ranks of their node.

    A remaining process keeps its old rank if that is free."""
    out = dict(processes)
    for pid, one in held.items():
        free = [
            rank
            for rank in range(topology.world_size)
            if rank not in out and (where is None or topology.nodes[rank] == where[pid])
        ]
        if pid not in processes.values() and free:
            out[one.rank if one.rank in free else free[0]] = pid
    return out
