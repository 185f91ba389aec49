"""What the time of a run's nodes went to, and so what each class of time cost.

Dollars come from one place, `policy.spending.SpendMeter`: the stays of the nodes, and the price of
each. This module splits stays by the classes of `rankledger.RANK_CLASSES`. `/metrics` counts in
floats, and `holdfast cost` in fractions, to the cent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from fractions import Fraction
from typing import Generic, TypeVar

from holdfast.policy.spending import HOUR_S, NodeStay
from holdfast.report.ledger.rankledger import RANK_CLASSES, RankLedger

N = TypeVar("N", float, Fraction)


@dataclass(frozen=True)
class _Part(Generic[N]):
    """Time in which the membership did not change, in seconds since 1970."""

    start: N
    stop: N
    nodes: frozenset[str]
    seconds: Mapping[str, N]  # by class; they add up to stop - start


class NodeTimes(Generic[N]):
    """The time of every node up to now. number: makes a number to count in."""

    def __init__(self, ledger: RankLedger, number: Callable[[float], N]) -> None:
        self._parts: list[_Part[N]] = []
        zero = number(ledger.began_at)
        for part in ledger.times().parts:
            seconds = {name: number(value) for name, value in part.seconds.items()}
            start, stop = number(part.start), number(part.stop)
            total = sum(seconds.values(), number(0.0))
            if total > 0 and stop > start and part.members.nodes:
                scaled = {k: value * (stop - start) / total for k, value in seconds.items()}
                nodes = frozenset(part.members.nodes)
                self._parts.append(_Part(zero + start, zero + stop, nodes, scaled))
        self._none: N = number(0.0)

    def split(self, nodes: Set[str], start: N, stop: N) -> dict[str, N]:
        """Return node-seconds by class of RANK_CLASSES of nodes that were there from start to stop;
        they add up to its length for each node. Time in which no rank was on a node is idle."""
        found = dict.fromkeys(RANK_CLASSES, self._none)
        for part in self._parts:
            shared = min(stop, part.stop) - max(start, part.start)
            if shared > 0 and (held := len(nodes & part.nodes)):
                share = held * shared / (part.stop - part.start)
                for name, seconds in part.seconds.items():
                    found[name] += share * seconds
        total = len(nodes) * (stop - start)
        rest = total - sum(found.values(), self._none)
        if rest < 0:  # clocks of two coordinators differ
            return {name: seconds * total / (total - rest) for name, seconds in found.items()}
        found["idle"] += rest
        return found


def dollars_by_class(ledger: RankLedger, stays: Iterable[NodeStay]) -> dict[str, float] | None:
    """Return dollars by class of RANK_CLASSES; they add up to those of the meter with these stays.
    None if no stay has a price."""
    alike: dict[tuple[float, float, float], set[str]] = {}
    for stay in stays:
        if stay.price.usd_per_hour is not None:
            alike.setdefault((stay.begin, stay.end, stay.price.usd_per_hour), set()).add(stay.node)
    times, found = NodeTimes(ledger, float), dict.fromkeys(RANK_CLASSES, 0.0)
    for (begin, end, usd_per_hour), nodes in alike.items():
        for name, seconds in times.split(nodes, begin, end).items():
            found[name] += seconds / HOUR_S * usd_per_hour
    return found if alike else None
