"""Placement of snapshot copies in the memory of other machines. Pure: machines in, a plan out.

A copy is worth what it survives, so it is placed as far from its owner as the machines allow. The
machines of a domain may fail together. The plan first avoids the kind of domain that does so most
often. Among machines that are equally far away the load decides, then a hash of both names. The
hash is the same on every machine that computes the plan.

The plan that was in force is an input too. A holder stays if no farther one has appeared and the
load is even. So the loss of a machine moves only the copies that it held. Its return moves only as
many as are needed to share the load again. One machine may be named as stable (the staging node of
ACUTE, IEEE Access 2024). Every owner's first copy goes there while it has room.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from xxhash import xxh3_64_intdigest

from holdfast.core.json_parsing import JsonMessage

FAILURE_DOMAINS = ("node", "rack", "power", "pool", "zone")
"""Kinds of domain that two machines can share. The plan avoids the first kinds most, because a
small domain fails completely more often than a large one. The spot pool is before the zone, which
may contain several pools. A pool's machines are taken back together."""

_DOMAIN_RISK = {kind: 1 << place for place, kind in enumerate(reversed(FAILURE_DOMAINS))}


@dataclass(frozen=True)
class Machine(JsonMessage):
    """A place where a mover runs. An empty domain is unknown and counts as shared with no other
    machine. `node` is the host if several movers share one; empty: the machine's own name. `room`:
    bytes that it keeps for other machines at most, None for no bound."""

    name: str
    node: str = ""
    rack: str = ""
    power: str = ""
    pool: str = ""
    zone: str = ""
    room: int | None = None

    def domain(self, kind: str) -> str:
        value = str(getattr(self, kind))
        return value or (self.name if kind == "node" else "")


@dataclass(frozen=True)
class Placement:
    """`holders[owner]`: who keeps its copies, the farthest first. `warnings`: one sentence for
    each owner that has fewer copies than were asked for, or one that shares a domain with it."""

    holders: Mapping[str, tuple[str, ...]]
    warnings: tuple[str, ...] = ()


def shared_domains(one: Machine, other: Machine) -> tuple[str, ...]:
    """The kinds of domain that two machines have in common, the worst first."""
    return tuple(
        kind
        for kind in FAILURE_DOMAINS
        if one.domain(kind) and one.domain(kind) == other.domain(kind)
    )


def place_copies(
    sizes: Mapping[str, int],
    machines: Iterable[Machine],
    *,
    copies: int = 1,
    stable_machine: str | None = None,
    previous: Mapping[str, Sequence[str]] | None = None,
) -> Placement:
    """Return the holders of each owner's snapshots. `sizes`: owner -> bytes of one copy.

    Owners are machines themselves. `previous` is the plan in force; names that are no longer there
    are skipped. Raises ValueError for an owner or a stable machine that is not among `machines`.
    """
    known = {machine.name: machine for machine in machines}
    strangers = sorted((set(sizes) | ({stable_machine} if stable_machine else set())) - set(known))
    if strangers:
        raise ValueError(f"{', '.join(strangers)} is not among the machines")
    work = _PlacementSolver(known, dict(sizes), copies, stable_machine, previous or {})
    for owner in work.owners_in_order():
        work.place_owner(owner)
    work.balance_load()
    return work.to_placement()


@dataclass
class _PlacementSolver:
    machines: dict[str, Machine]
    sizes: dict[str, int]
    copies: int
    stable_machine: str | None
    previous: Mapping[str, Sequence[str]]
    load: dict[str, int] = field(default_factory=dict)
    holders: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.load = dict.fromkeys(self.machines, 0)
        self.holders = {owner: [] for owner in self.sizes}

    def owners_in_order(self) -> list[str]:
        """Return the owners, those with placed copies first, so that these keep their room."""
        return sorted(
            self.sizes,
            key=lambda o: (not any(h in self.machines for h in self.previous.get(o, ())), o),
        )

    def place_owner(self, owner: str) -> None:
        if self.stable_machine is not None and self._fits(owner, self.stable_machine):
            self._place_copy(owner, self.stable_machine)
        here = self.previous.get(owner, ())

        def rank(name: str) -> tuple[int, int, bool, int, int]:
            """Least is best: distance to the owner and to its other copies, no move, load."""
            near, load = self._nearness(owner, name, ()), self.load[name]
            return *near, name not in here, load, _tie_break(owner, name)

        while len(self.holders[owner]) < self.copies:
            free = [n for n in self.machines if n != self.stable_machine and self._fits(owner, n)]
            if not free:
                return
            self._place_copy(owner, min(free, key=rank))

    def balance_load(self) -> None:
        """Move copies off the fullest machines while that makes the load more even and no copy
        stands nearer for it. Each move makes the sum of squares of the loads smaller."""

        def moves_one() -> bool:
            fullest_first = sorted(self.load, key=lambda name: (-self.load[name], name))
            return any(map(self._move_one_copy_off, fullest_first))

        while moves_one():
            pass

    def to_placement(self) -> Placement:
        return Placement(
            {owner: tuple(held) for owner, held in sorted(self.holders.items())},
            tuple(text for owner in sorted(self.sizes) for text in self._warnings_for(owner)),
        )

    # --- parts ------------------------------------------------------------------------------
    def _fits(self, owner: str, name: str) -> bool:
        if name == owner or name in self.holders[owner]:
            return False
        room = self.machines[name].room
        return room is None or self.load[name] + self.sizes[owner] <= room

    def _place_copy(self, owner: str, name: str) -> None:
        self.holders[owner].append(name)
        self.load[name] += self.sizes[owner]

    def _nearness(self, owner: str, name: str, leaving: Sequence[str]) -> tuple[int, int]:
        mine, machine = self.machines[owner], self.machines[name]
        others = (self.machines[h] for h in self.holders[owner] if h not in leaving)
        return shared_risk(mine, machine), sum(shared_risk(h, machine) for h in others)

    def _move_one_copy_off(self, full: str) -> bool:
        """Move one copy off a machine; whether there was one to move."""
        if full == self.stable_machine:
            return False
        for owner in sorted(
            (o for o, held in self.holders.items() if full in held),
            key=lambda o: -_tie_break(o, full),
        ):
            now = self._nearness(owner, full, (full,))
            better = [
                name
                for name in self.machines
                if name != self.stable_machine
                and self._fits(owner, name)
                and self.load[name] + self.sizes[owner] < self.load[full]
                and self._nearness(owner, name, (full,)) <= now
            ]
            if better:
                target = min(better, key=lambda n: (self.load[n], _tie_break(owner, n)))
                place = self.holders[owner].index(full)
                self.holders[owner][place] = target
                self.load[full] -= self.sizes[owner]
                self.load[target] += self.sizes[owner]
                return True
        return False

    def _warnings_for(self, owner: str) -> Iterable[str]:
        held = self.holders[owner]
        if len(held) < self.copies:
            yield f"{owner} has {len(held)} of {self.copies} copies: no other machine has room"
        for name in held:
            both = shared_domains(self.machines[owner], self.machines[name])
            if both:
                which = f"{both[0]} {self.machines[owner].domain(both[0])}"
                yield f"{owner} and its copy on {name} share the {which}"


def shared_risk(one: Machine, other: Machine) -> int:
    """Return how much two machines fail together, and how near they are: sharing one domain counts
    more than sharing all that are listed after it."""
    return sum(_DOMAIN_RISK[kind] for kind in shared_domains(one, other))


def _tie_break(owner: str, name: str) -> int:
    return int(xxh3_64_intdigest(f"{owner}\0{name}".encode()))
