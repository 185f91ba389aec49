"""Node-hours and dollars of a run, from its journal, and what a budget makes of them. Pure.

The agent that leads writes which nodes are there, and what an hour of each costs (`NodesPresent`).
A node counts from then on, until it is no longer there or the session ends. Nodes of a session's
first such event count from the session's start. Time between two sessions does not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from holdfast.core.json_parsing import JsonMessage
from holdfast.events import (
    NodesPresent,
    Record,
    RunFailed,
    RunFinished,
    RunStarted,
    RunStopped,
    TaskEvaluated,
)

HOUR_S = 3600.0
_ENDS = (RunStopped, RunFinished, RunFailed)


@dataclass(frozen=True)
class NodePrice(JsonMessage):
    """What an hour of a node costs. usd_per_hour: None if it is not known. pool: of the cluster
    file. resource: the node's id in its owner's bill; "": its name."""

    absent_if_default = frozenset({"pool", "market", "usd_per_hour", "resource"})
    pool: str = ""
    market: str = ""  # on-demand or spot
    usd_per_hour: float | None = None
    resource: str = ""


@dataclass(frozen=True)
class NodeStay:
    """One node, from `begin` to `end` in seconds since 1970, at one price. tags: of its session."""

    node: str
    price: NodePrice
    begin: float
    end: float
    tags: Mapping[str, str] = field(default_factory=dict)

    @property
    def hours(self) -> float:
        return (self.end - self.begin) / HOUR_S

    @property
    def usd(self) -> float | None:
        """Dollars; None if the price is not known."""
        rate = self.price.usd_per_hour
        return None if rate is None else rate * self.hours


@dataclass(frozen=True)
class Spent:
    """usd: of the nodes whose price is known. unpriced_hours: of all other nodes."""

    node_hours: float = 0.0
    usd: float = 0.0
    unpriced_hours: float = 0.0

    def __add__(self, other: Spent) -> Spent:
        return Spent(
            self.node_hours + other.node_hours,
            self.usd + other.usd,
            self.unpriced_hours + other.unpriced_hours,
        )


def total(stays: Iterable[NodeStay]) -> Spent:
    hours = usd = unknown = 0.0
    for stay in stays:
        hours += stay.hours
        usd += stay.usd or 0.0
        unknown += stay.hours if stay.usd is None else 0.0
    return Spent(hours, usd, unknown)


class SpendMeter:
    """Feed it records with `observe`, in the order of `in_order`; read `stays` and `spent`."""

    def __init__(self) -> None:
        self._closed: list[NodeStay] = []
        self._closed_sum = Spent()
        self._present: dict[str, tuple[NodePrice, float]] = {}  # and since when
        self._tags: Mapping[str, str] = {}
        self._session_start: float | None = None  # None: nothing is at work
        self._is_first_word = False  # no `NodesPresent` of this session was read yet
        self._now = 0.0

    def observe(self, record: Record) -> None:
        event = record.event
        if isinstance(event, TaskEvaluated):
            return  # by another process, perhaps long after the run
        if isinstance(event, RunStarted):
            self._end_session()
            self._session_start, self._is_first_word = record.time, True
            self._now, self._tags = max(self._now, record.time), event.tags
        elif self._session_start is None:
            return
        self._now = max(self._now, record.time)
        if isinstance(event, NodesPresent):
            self._take({n: NodePrice.from_json(row) for n, row in event.nodes.items()})
        elif isinstance(event, _ENDS):
            self._end_session()

    def _take(self, nodes: Mapping[str, NodePrice]) -> None:
        for name, (price, _) in list(self._present.items()):
            if nodes.get(name) != price:
                self._close(name)
        since = self._now
        if self._is_first_word and self._session_start is not None:
            since, self._is_first_word = self._session_start, False
        for name, price in nodes.items():
            self._present.setdefault(name, (price, since))

    def _close(self, name: str) -> None:
        price, since = self._present.pop(name)
        stay = NodeStay(name, price, since, max(since, self._now), self._tags)
        self._closed.append(stay)
        self._closed_sum += total([stay])

    def _end_session(self) -> None:
        for name in list(self._present):
            self._close(name)
        self._session_start = None

    def _open(self, now: float) -> list[NodeStay]:
        end = max(now, self._now)
        return [
            NodeStay(name, price, since, max(since, end), self._tags)
            for name, (price, since) in self._present.items()
        ]

    @property
    def stays(self) -> tuple[NodeStay, ...]:
        """Every stay, in the order of their ends; one that lasts ends with the newest record."""
        return (*self._closed, *self._open(self._now))

    def spent(self, now: float = 0.0) -> Spent:
        """Return what the run has used up to `now`, or up to the newest record if that is later."""
        return self._closed_sum + total(self._open(now))

    def price_of(self, node: str) -> NodePrice | None:
        """Return the newest price of a node; None if the journal never had it."""
        if node in self._present:
            return self._present[node][0]
        return next((stay.price for stay in reversed(self._closed) if stay.node == node), None)

    @property
    def rate(self) -> Spent:
        """What an hour costs with the nodes that are there."""
        return total(
            NodeStay(name, price, 0.0, HOUR_S) for name, (price, _) in self._present.items()
        )


def in_order(records: Iterable[Record]) -> list[Record]:
    """Return the records by generation, and each generation by its clock."""
    return sorted(records, key=lambda r: (r.generation, r.time, r.writer, r.sequence))


def meter_of(records: Iterable[Record]) -> SpendMeter:
    meter = SpendMeter()
    for record in in_order(records):
        meter.observe(record)
    return meter
