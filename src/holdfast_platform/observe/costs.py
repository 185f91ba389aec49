"""What runs cost, by what their time went to: node-hours of the journal times the prices in it.

Every sum is exact (`fractions.Fraction`), and is rounded to cents once, so that a table adds up.
What a node's time went to is split by `report.ledger.nodetimes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import TypeVar

from holdfast.events import Record, RunStarted
from holdfast.launch.run.runs import Run
from holdfast.policy.spending import HOUR_S, NodeStay, SpendMeter
from holdfast.report.ledger.nodetimes import NodeTimes
from holdfast.report.ledger.ordering import order_records
from holdfast.report.ledger.rankledger import RANK_CLASSES, RankLedger
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
class RunUse:
    """The stays of a run's nodes, and what their time went to."""

    place: str
    name: str
    tags: Mapping[str, str]  # of the newest session
    stays: tuple[NodeStay, ...]
    times: NodeTimes[Fraction]

    def split(self, node: str, start: Fraction, stop: Fraction) -> Split:
        """Return seconds of a node by kind; they add up to stop - start."""
        found = dict.fromkeys(KINDS, Fraction(0))
        for name, seconds in self.times.split({node}, start, stop).items():
            found[_KIND_OF[name]] += seconds
        return found


def use_of(run: Run) -> RunUse:
    """Read a run's journal. Raises what the run store raises."""
    return use_of_records(read_journal(run.store), run.place, run.config.name)


def use_of_records(records: Sequence[Record], place: str, name: str) -> RunUse:
    ledger, meter = RankLedger(), SpendMeter()
    tags: Mapping[str, str] = {}
    for record in order_records(records):
        ledger.observe(record)
        meter.observe(record)
        if isinstance(record.event, RunStarted):
            tags = record.event.tags
    return RunUse(place, name, tags, meter.stays, NodeTimes(ledger, exact))


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
