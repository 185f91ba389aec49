"""What runs cost, by what their time went to: node-hours of the journal times the prices in it.

Every sum is exact (`fractions.Fraction`), and is rounded to cents once, so that a table adds up.
A node's time is that of the ranks on it (`report.ledger.rankledger`), which work side by side.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import TypeVar

from holdfast.events import Record, RunStarted
from holdfast.launch.run.runs import Run
from holdfast.policy.spending import HOUR_S, NodeStay, meter_of
from holdfast.report.ledger.ordering import order_records
from holdfast.report.ledger.rankledger import RANK_CLASSES, RankInterval, RankLedger
from holdfast.wire.journal import read_journal

K = TypeVar("K")

KINDS: dict[str, tuple[str, ...]] = {
    "useful": ("productive", "evaluation"),
    "rework": ("rework",),
    "waiting": (
        *("communication", "data_wait", "checkpoint", "startup", "recovery", "other"),
        "stopped",
    ),
    "idle": ("idle",),
}
"""What cost is split into, and the classes of time in each."""
_KIND_OF = {name: kind for kind, names in KINDS.items() for name in names}
assert _KIND_OF.keys() == RANK_CLASSES.keys()
CENT = Fraction(1, 100)

Split = dict[str, Fraction]
"""Kind of KINDS -> seconds, or dollars."""


def exact(value: float) -> Fraction:
    """Return the number that a float shows: 2.4 is 12/5."""
    return Fraction(repr(value))


@dataclass(frozen=True)
class _Segment:
    """What a node's time went to from `start` to `stop`, in seconds since 1970."""

    start: Fraction
    stop: Fraction
    seconds: Split  # they add up to stop - start


@dataclass(frozen=True)
class RunUse:
    """The stays of a run's nodes, and what their time went to."""

    place: str
    name: str
    tags: Mapping[str, str]  # of the newest session
    stays: tuple[NodeStay, ...]
    segments: Mapping[str, tuple[_Segment, ...]]  # by node

    def split(self, node: str, start: Fraction, stop: Fraction) -> Split:
        """Return seconds of a node by kind; they add up to stop - start. Time in which none of the
        run's ranks was on the node is idle."""
        found = dict.fromkeys(KINDS, Fraction(0))
        for segment in self.segments.get(node, ()):
            shared = min(stop, segment.stop) - max(start, segment.start)
            if shared > 0:
                part = shared / (segment.stop - segment.start)
                for kind, seconds in segment.seconds.items():
                    found[kind] += part * seconds
        rest = stop - start - sum(found.values())
        if rest < 0:  # clocks of two coordinators differ
            scale = (stop - start) / (stop - start - rest)
            return {kind: seconds * scale for kind, seconds in found.items()}
        found["idle"] += rest
        return found


def use_of(run: Run) -> RunUse:
    """Read a run's journal. Raises what the run store raises."""
    return use_of_records(read_journal(run.store), run.place, run.config.name)


def use_of_records(records: Sequence[Record], place: str, name: str) -> RunUse:
    ledger = RankLedger()
    ordered = order_records(records)
    for record in ordered:
        ledger.observe(record)
    starts = [record for record in ordered if isinstance(record.event, RunStarted)]
    tags: Mapping[str, str] = {}
    if starts and isinstance(event := starts[-1].event, RunStarted):
        tags = event.tags
    zero = exact(starts[0].time) if starts else Fraction(0)
    return RunUse(
        place, name, tags, meter_of(records).stays, _segments(ledger.times().intervals(), zero)
    )


def _segments(intervals: Iterable[RankInterval], zero: Fraction) -> dict[str, tuple[_Segment, ...]]:
    """Return each node's segments: the mean of its ranks, which work side by side."""
    together: dict[tuple[str, float, float], list[RankInterval]] = {}
    for each in intervals:
        if each.node and each.stop > each.start:
            together.setdefault((each.node, each.start, each.stop), []).append(each)
    found: dict[str, list[_Segment]] = {}
    for (node, start, stop), ranks in together.items():
        sums = dict.fromkeys(KINDS, Fraction(0))
        for rank in ranks:
            for name, seconds in rank.seconds.items():
                sums[_KIND_OF[name]] += exact(seconds)
        length, total = exact(stop) - exact(start), sum(sums.values())
        if total > 0:
            scaled = {kind: seconds * length / total for kind, seconds in sums.items()}
            begin = zero + exact(start)
            found.setdefault(node, []).append(_Segment(begin, begin + length, scaled))
    return {node: tuple(segments) for node, segments in found.items()}


@dataclass
class Cost:
    """Dollars by kind. hours: of all nodes. unpriced_hours: of these, without a price."""

    dollars: Split
    hours: Fraction = Fraction(0)
    unpriced_hours: Fraction = Fraction(0)

    @property
    def total(self) -> Fraction:
        return sum(self.dollars.values(), Fraction(0))

    def add(self, other: Cost) -> None:
        for kind, value in other.dollars.items():
            self.dollars[kind] += value
        self.hours += other.hours
        self.unpriced_hours += other.unpriced_hours


def no_cost() -> Cost:
    return Cost(dict.fromkeys(KINDS, Fraction(0)))


def cost_of_stay(use: RunUse, stay: NodeStay) -> Cost:
    """Return what one stay cost at its own price."""
    begin, end = exact(stay.begin), exact(stay.end)
    hours, rate = (end - begin) / Fraction(HOUR_S), stay.price.usd_per_hour
    found = no_cost()
    found.hours = hours
    if rate is None:
        found.unpriced_hours = hours
        return found
    for kind, seconds in use.split(stay.node, begin, end).items():
        found.dollars[kind] = seconds * exact(rate) / Fraction(HOUR_S)
    return found


def costs_by(uses: Iterable[RunUse], tag: str = "") -> dict[str, Cost]:
    """Return the cost of each run by its place, or with `tag` of each value of that tag; "" is what
    has no such tag. A run whose tag has changed counts to each value by its sessions."""
    found: dict[str, Cost] = {}
    for use in uses:
        if not tag:
            found.setdefault(use.place, no_cost())
        for stay in use.stays:
            key = stay.tags.get(tag, "") if tag else use.place
            found.setdefault(key, no_cost()).add(cost_of_stay(use, stay))
    return dict(sorted(found.items()))


def to_cents(amounts: Mapping[K, Fraction]) -> dict[K, Decimal]:
    """Round amounts to cents so that they add up to their sum in cents (largest remainders)."""
    cents = {key: amount // CENT for key, amount in amounts.items()}
    missing = round(sum(amounts.values(), Fraction(0)) / CENT) - sum(cents.values())
    by_rest = sorted(amounts, key=lambda key: amounts[key] / CENT - cents[key], reverse=True)
    for key in by_rest[:missing]:
        cents[key] += 1
    return {key: Decimal(number).scaleb(-2) for key, number in cents.items()}
