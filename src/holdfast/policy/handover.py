"""From a notice to a planned move: what has to be where, by when, and how the run goes on. Pure.

Nodes are about to go; the others stay. Training stops at the end of the step that is being
computed, or in the midst of it where there is no time for that. Then, the best first:

    live      those who stay hold the whole state between them: the nodes leave, and nothing travels
    carried   something lies on the nodes that go alone. Every rank captures its state, the parts of
              the ranks that go travel into the memory of nodes that stay, and the run goes on from
              there. What memory elsewhere holds already does not travel
    saved     memory cannot have it in time, but a tier that survives can: the run goes on from that
    back      nothing will have it in time by what was measured. It is tried, for a measurement is
              one of other minutes; if it fails, the run goes on from the newest step that is whole
              elsewhere
    leave     what is left cannot run this model: the state is saved into what survives, and the
              run ends

Time is planned as in `emergency.py`: a share `MARGIN` of what is left is not planned with, and a
link sends or takes one part after the other, because two halves are no copy. Nodes that have long
yet stay at work until `SOON` is left, and are planned for again then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from math import inf

from holdfast.layout import Topology
from holdfast.policy.emergency import MARGIN, Emergency, Route, emergency
from holdfast.policy.hazard import duration
from holdfast.policy.survivors import unheld
from holdfast.spec.ownership import Ownership
from holdfast.spec.state import ITEM_BYTES, StateTable

SOON = 150.0
"""Seconds. The clouds' notices are shorter; a node that has longer is of use until then."""


class Way(StrEnum):
    LIVE = "live"
    CARRIED = "carried"
    SAVED = "saved"
    BACK = "back"
    LEAVE = "leave"


@dataclass(frozen=True)
class Kept:
    """A copy of a rank's part in a node's memory, of the state after `step`. mirror: a rank on that
    node captures the same part itself, so every capture is there at once (`mirrors.py`)."""

    node: str
    step: int
    mirror: bool = False


@dataclass(frozen=True)
class Pace:
    """Seconds: to the end of the step, at most; to capture a state; to make a new generation."""

    step: float
    capture: float = 0.0
    regroup: float = 0.0


@dataclass(frozen=True)
class Links:
    """Bytes a second out of and into each node, as measured; `assumed` of a node that never was."""

    assumed: float
    out: Mapping[str, float] = field(default_factory=dict)
    into: Mapping[str, float] = field(default_factory=dict)

    def rate(self, source: str, target: str) -> float:
        return min(self.out.get(source, self.assumed), self.into.get(target, self.assumed))

    def slowest(self, nodes: Iterable[str]) -> float:
        """Of those of more than nothing, so that a node without a link makes no time infinite."""
        rates = [side.get(n, self.assumed) for n in nodes for side in (self.out, self.into)]
        return min((rate for rate in rates if rate > 0), default=self.assumed)


@dataclass(frozen=True)
class Stays:
    """What there is to move to. refit: the bytes of state that travel when the run is laid out on
    these nodes, None where it cannot be. idle: nodes without a rank. free: bytes that a node can
    keep for others; one that is not named keeps whatever comes."""

    refit: Callable[[frozenset[str]], int | None]
    idle: frozenset[str] = frozenset()
    free: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Known:
    """What is known of the state. step: the one that is being computed; committed: the newest
    checkpoint's; kept: copies of each rank's part in memory; routes: the ways into the tiers."""

    step: int
    committed: int = 0
    kept: Mapping[int, Sequence[Kept]] = field(default_factory=dict)
    routes: Sequence[Route] = ()


@dataclass(frozen=True)
class Copy:
    """The part of the state that `rank` owns goes from its node to `target`; seconds from now."""

    rank: int
    source: str
    target: str
    bytes: int
    begin: float
    done: float


@dataclass(frozen=True)
class Handover:
    """All times are seconds from now.

    goes: the nodes that leave. later: when to plan again for the others. stop: training stops, at
    the end of the step or in its midst. step: the state that the run goes on from is that after it.
    left_to: whose part lies on which node already, or does when it is captured. copies: what has to
    travel. saves: into which tiers, for `saved` and `leave`. let_go: the nodes may go; done: the
    run is at work again. at_risk: bytes that lie on the nodes that go alone. sure: all this is in
    time, by what was measured. again: steps that are done again, and `or_again` if it fails.
    """

    way: Way
    goes: tuple[str, ...]
    later: Mapping[str, float]
    stop: float
    after_step: bool
    step: int
    left_to: Mapping[int, str]
    copies: tuple[Copy, ...]
    saves: Emergency | None
    let_go: float
    done: float
    at_risk: int
    sure: bool
    again: int
    or_again: int
    reason: str

    @property
    def pause(self) -> float:
        """Seconds without training."""
        return self.done - self.stop


def handover(
    topology: Topology, table: StateTable, going: Mapping[str, float], known: Known, stays: Stays,
    links: Links, pace: Pace,
) -> Handover | None:  # fmt: skip
    """What to do about nodes that will be gone in so many seconds; None as long as all have time.

    Raises ValueError for a node that is not there.
    """
    unknown = sorted(going.keys() - set(topology.nodes) - stays.idle)
    if unknown:
        raise ValueError(f"no rank is on node {unknown[0]}, and it is no spare")
    soon = {node: left for node, left in going.items() if left <= SOON}
    if not soon:
        return None
    return _Planning(topology, table, going, soon, known, stays, links, pace).plan()


@dataclass
class _Planning:
    topology: Topology
    table: StateTable
    going: Mapping[str, float]
    soon: Mapping[str, float]
    known: Known
    stays: Stays
    links: Links
    pace: Pace

    def plan(self) -> Handover:
        moved = self.stays.refit(self.there) if self.there else None
        if moved is None:
            return self._leave()
        # As if all of it went over one link: a little too long rather than too short.
        refit = self.pace.regroup + moved / self.links.slowest(self.there)
        if not self.ranks:
            return self._made(
                Way.LIVE, let_go=0.0, done=self.pace.step, reason="no rank is there"
            )  # fmt: skip
        if not self.stranded:
            return self._live(refit)
        tried = [self._carried(refit, after_step=True), self._carried(refit, after_step=False)]
        sure = next((way for way in tried if way.sure), None) or self._saved(refit)
        return sure or min(tried, key=lambda way: way.let_go)

    # --- the facts ------------------------------------------------------------------------------
    @cached_property
    def ranks(self) -> list[int]:
        """Those on the nodes that go."""
        return [rank for rank, node in enumerate(self.topology.nodes) if node in self.soon]

    @cached_property
    def there(self) -> frozenset[str]:
        return frozenset((*self.topology.nodes, *self.stays.idle)) - self.soon.keys()

    @cached_property
    def usable(self) -> float:
        return min(self.soon.values()) * (1 - MARGIN)

    @cached_property
    def sizes(self) -> dict[int, int]:
        """Bytes that each rank that goes owns, where it owns any."""
        owned = Ownership(self.topology, self.table)
        item = {spec.name: ITEM_BYTES[spec.dtype] for spec in self.table}
        of = {r: sum(b.size * item[b.name] for b in owned.boxes(r)) for r in self.ranks}
        return {rank: nbytes for rank, nbytes in of.items() if nbytes}

    @cached_property
    def stranded(self) -> bool:
        """Whether those who stay lack some of the state."""
        stay = set(range(self.topology.world_size)) - set(self.ranks)
        return unheld(self.topology, self.table, stay) is not None

    @cached_property
    def newest(self) -> int:
        """The newest step that is whole without the nodes that go: of their parts there has to be
        one step in memory elsewhere, of which those who stay have their own."""
        steps = [{c.step for c in self._safe(rank)} for rank in self.sizes]
        common = set.intersection(*steps) if steps else set()
        return max(self.known.committed, *common) if common else self.known.committed

    def _safe(self, rank: int) -> list[Kept]:
        """Copies of its part on nodes that stay for good."""
        return [c for c in self.known.kept.get(rank, ()) if self._is_safe(c.node)]

    def _is_safe(self, node: str) -> bool:
        return node in self.there and node not in self.going

    # --- the ways -------------------------------------------------------------------------------
    def _live(self, refit: float) -> Handover:
        after = self.pace.step <= self.usable
        stop = self.pace.step if after else 0.0
        when = "after" if after else "in the midst of"
        return self._made(
            Way.LIVE, after_step=after, let_go=stop, done=stop + refit,
            reason=f"the others hold the whole state, and go on {when} step {self.known.step}",
        )  # fmt: skip

    def _carried(self, refit: float, *, after_step: bool) -> Handover:
        begin = self.pace.capture + (self.pace.step if after_step else 0.0)
        step = self.known.step - (0 if after_step else 1)
        left_to = {
            rank: copy.node
            for rank in self.sizes
            for copy in reversed(self._safe(rank))  # so that the first that is named counts
            if copy.mirror or copy.step == step
        }
        travel = {r: n for r, n in self.sizes.items() if r not in left_to}
        copies = self._copies(travel, begin)
        late = [c for c in copies if c.done > self.soon[c.source] * (1 - MARGIN)]
        homeless = sorted(travel.keys() - {copy.rank for copy in copies})
        sure = not late and not homeless and begin <= self.usable
        let_go = max((copy.done for copy in copies), default=begin)
        told = self._told(copies, left_to, step)
        if homeless:
            told += f"; nobody who stays has room for the part of rank {homeless[0]}"
        if late or begin > self.usable:
            told += f"; that takes {duration(let_go)}, and {duration(self.usable)} are planned with"
        if not sure:
            told += f"; if it fails, the run goes on from step {self.newest}"
        return self._made(
            Way.CARRIED if sure else Way.BACK, after_step=after_step, left_to=left_to,
            copies=copies, let_go=let_go, done=let_go + refit, sure=sure, reason=told,
        )  # fmt: skip

    def _saved(self, refit: float) -> Handover | None:
        found = self._emergency()
        if not found.tiers:
            return None
        return self._made(
            Way.SAVED, saves=found, let_go=found.done[0], done=found.done[0] + refit,
            reason=f"the run goes on from a save: {found.reason}",
        )  # fmt: skip

    def _leave(self) -> Handover:
        found = self._emergency()
        done = max((self.pace.step, *found.done[:1]))
        return self._made(
            Way.LEAVE, saves=found, let_go=done, done=done, sure=bool(found.tiers),
            reason=f"what is left cannot run this model, so the run leaves: {found.reason}",
        )  # fmt: skip

    def _emergency(self) -> Emergency:
        """A save is of every rank's part. It begins when the step ends; the routes know that."""
        total = sum(spec.nbytes for spec in self.table)
        return emergency(min(self.soon.values()), total, self.known.routes)

    # --- parts ----------------------------------------------------------------------------------
    def _copies(self, travel: Mapping[int, int], begin: float) -> tuple[Copy, ...]:
        """Each part to one node, the largest first, so that the last is there as soon as can be.
        Who keeps copies of that rank already has the room; parts that find none are left out."""
        free = {n: self.stays.free.get(n, inf) for n in sorted(self.there) if self._is_safe(n)}
        busy: dict[tuple[str, str], float] = {}  # until when a link is, by direction and node
        made: list[Copy] = []
        for rank, nbytes in sorted(travel.items(), key=lambda item: (-item[1], item[0])):
            source, keepers = self.topology.nodes[rank], {c.node for c in self._safe(rank)}
            able: list[tuple[float, bool, str, float]] = []
            for target in free:
                rate = self.links.rate(source, target)
                if rate > 0 and (target in keepers or free[target] >= nbytes):
                    at = max(begin, busy.get(("out", source), 0), busy.get(("in", target), 0))
                    able.append((at + nbytes / rate, target not in keepers, target, at))
            if not able:
                continue
            done, new, target, at = min(able)
            made.append(Copy(rank, source, target, nbytes, at, done))
            busy["out", source] = busy["in", target] = done
            free[target] -= nbytes if new else 0
        return tuple(made)

    def _told(self, copies: tuple[Copy, ...], left_to: Mapping[int, str], step: int) -> str:
        nbytes = sum(copy.bytes for copy in copies)
        sent = f"{nbytes / 1e6:,.0f} MB of step {step} to {_named(c.target for c in copies)}"
        there = f"{len(left_to)} of {len(self.sizes)} parts lie on {_named(left_to.values())}"
        return "; ".join(([sent] if copies else []) + ([there] if left_to else [])) or "nothing"

    def _made(
        self, way: Way, *, let_go: float, done: float, reason: str, after_step: bool = True,
        left_to: Mapping[int, str] | None = None, copies: tuple[Copy, ...] = (),
        saves: Emergency | None = None, sure: bool = True,
    ) -> Handover:  # fmt: skip
        stop = self.pace.step if after_step else 0.0
        step = self.known.step - (0 if after_step else 1)
        newest = self.newest if self.stranded else self.known.step - 1
        who, left = _named(sorted(self.soon)), duration(min(self.soon.values()))
        return Handover(
            way, tuple(sorted(self.soon)),
            {n: left - SOON for n, left in self.going.items() if n not in self.soon},
            stop, after_step, step, left_to or {}, copies, saves, let_go, done,
            sum(self.sizes.values()) if self.stranded else 0, sure,
            self.known.step - step, max(0, self.known.step - newest),
            f"{who} will be gone in {left}: {reason}",
        )  # fmt: skip


def _named(names: Iterable[str]) -> str:
    found = list(dict.fromkeys(names))
    return ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
