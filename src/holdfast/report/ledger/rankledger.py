"""The time ledger of every rank and of the fleet.

A rank is a place in the run's Topology. Each rank that the run ever had accounts for every second
of the wall time. So does a spare node while it waits. The time of the fleet is the sum over ranks
and spare nodes, in rank-seconds.

The ranks of a generation work in step. So while a generation has a rank, the rank takes the
classes of the run's spans (`timeledger.Span`). While it has not, the time is "idle". Only rank 0
reports how long the phases of a step took, so these are the same for all ranks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from holdfast.events import GenerationStarted, Record, RunStarted, SparesChanged
from holdfast.report.ledger.timeledger import CLASSES, TimeLedger

RANK_CLASSES: dict[str, str] = CLASSES | {"idle": "a spare node, or a rank that no node holds"}
_SHORTEST_S = 1e-6  # two sums of the same seconds differ by less


@dataclass(frozen=True)
class RankInterval:
    """What the time of a rank, or of a spare node, went to from `start` to `stop`."""

    rank: int | None  # None: a spare node
    node: str  # that held the rank; "" if none did
    generation: int
    start: float  # seconds since the first RunStarted
    stop: float
    seconds: Mapping[str, float]  # by class of RANK_CLASSES; they add up to stop - start


@dataclass(frozen=True)
class _Membership:
    """From `start` to the start of the next membership."""

    start: float
    generation: int
    nodes: tuple[str, ...] = ()  # by rank
    spares: frozenset[str] = frozenset()
    is_known: bool = True  # False: a session began, the next generation says its ranks

    def seconds_of(self, node: str, seconds: Mapping[str, float]) -> Mapping[str, float]:
        """Return the time by class of a place that `node` holds, of the run's time by class."""
        return seconds if node or "stopped" in seconds else {"idle": sum(seconds.values())}


@dataclass(frozen=True)
class _Part:
    """A part of a span of the run in which the membership did not change."""

    members: _Membership
    start: float
    stop: float
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class RankTimes:
    """The time of every rank by class, up to some moment."""

    parts: tuple[_Part, ...] = ()
    ranks: int = 0  # the largest world size so far

    def intervals(self) -> list[RankInterval]:
        """Return the intervals of every rank, and then of the spare nodes, each in time order."""
        intervals = list[RankInterval]()
        for rank in range(self.ranks):
            for part in self.parts:
                members = part.members
                node = members.nodes[rank] if rank < len(members.nodes) else ""
                seconds = members.seconds_of(node, part.seconds)
                intervals.append(
                    RankInterval(rank, node, members.generation, part.start, part.stop, seconds)
                )
        for part in self.parts:
            idle = {"idle": part.stop - part.start}
            for node in sorted(part.members.spares):
                generation = part.members.generation
                intervals.append(RankInterval(None, node, generation, part.start, part.stop, idle))
        return intervals

    def totals(self) -> dict[int, dict[str, float]]:
        """Return rank -> seconds by class of RANK_CLASSES. They add up to the run's wall time."""
        totals = {rank: dict.fromkeys(RANK_CLASSES, 0.0) for rank in range(self.ranks)}
        for interval in self.intervals():
            if interval.rank is not None:
                for name, seconds in interval.seconds.items():
                    totals[interval.rank][name] += seconds
        return totals

    def fleet_totals(self) -> dict[str, float]:
        """Return rank-seconds by class of RANK_CLASSES: the sum over `intervals`."""
        totals = dict.fromkeys(RANK_CLASSES, 0.0)
        for part in self.parts:
            held = len(part.members.nodes)
            for name, value in part.seconds.items():
                totals[name] += held * value
            for name, value in part.members.seconds_of("", part.seconds).items():
                totals[name] += (self.ranks - held) * value
            totals["idle"] += len(part.members.spares) * (part.stop - part.start)
        return totals


class RankLedger:
    """Feed it every record with `observe`, in the order of `ordering.order_records`; read `times()`
    at any moment. `time` is the ledger of the run."""

    def __init__(self) -> None:
        self.time = TimeLedger()
        self.began_at = 0.0  # of the run, in seconds since 1970; 0: it did not begin
        self._memberships: list[_Membership] = [_Membership(0.0, 0)]

    def observe(self, record: Record) -> None:
        """Take the next record."""
        event = record.event
        if not isinstance(event, RunStarted | GenerationStarted | SparesChanged):
            self.time.observe(record)
            return
        before, newest = self.time.wall, self._memberships[-1]
        self.time.observe(record)
        elapsed = self.time.wall
        if isinstance(event, RunStarted):
            self.began_at = self.began_at or record.time
            paused = _Membership(before, newest.generation)
            self._memberships += [paused, replace(paused, start=elapsed, is_known=False)]
        elif isinstance(event, GenerationStarted):
            nodes = tuple(event.topology.get("nodes", ()))
            if not newest.is_known:
                self._memberships[-1] = replace(newest, nodes=nodes)
            spares = newest.spares.difference(nodes)
            self._memberships.append(_Membership(elapsed, record.generation, nodes, spares))
        else:
            spares = frozenset(event.nodes)
            self._memberships.append(replace(newest, start=elapsed, spares=spares))

    def times(self) -> RankTimes:
        """Return where the time went up to now."""
        ranks = max(len(membership.nodes) for membership in self._memberships)
        return RankTimes(tuple(self._parts()), ranks)

    def _parts(self) -> Iterator[_Part]:
        """Yield the run's spans, cut where the membership changed."""
        marks = [membership.start for membership in self._memberships]
        for span in self.time.spans():
            length, seconds = span.stop - span.start, {k: v for k, v in span.seconds.items() if v}
            if not seconds:
                continue
            first, last = (bisect_right(marks, edge) for edge in (span.start, span.stop))
            inside = [
                mark
                for mark in marks[first:last]
                if span.start + _SHORTEST_S < mark < span.stop - _SHORTEST_S
            ]
            for start, stop in pairwise([span.start, *inside, span.stop]):
                members = self._memberships[bisect_right(marks, (start + stop) / 2) - 1]
                share = (stop - start) / length
                part = {name: share * value for name, value in seconds.items()}
                yield _Part(members, start, stop, part)
