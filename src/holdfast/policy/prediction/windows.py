"""The signals of one node over the recent past, as a sequence of equal bins. Pure.

Eight numbers a bin, oldest bin first:

    0  share of the zone's nodes that were lost in the bin
    1  nodes that joined, by those that worked
    2  nodes of the zone that worked at its end, by the most that ever did
    3  1 if the node worked at its end
    4  losses of the node in it, log(1 + n)
    5  age of the node at its end, log(1 + age / bin), a tenth of it
    6  the same age by 48 bins, at most 2
    7  1 for a bin in which the zone was known at all
"""

from __future__ import annotations

from bisect import bisect_right
from math import log1p
from operator import attrgetter

from holdfast.policy.prediction.history import ClusterHistory, NodeRecord, ZoneRecord

SIGNALS_PER_BIN = 8

ZoneRows = list[tuple[float, float, float, float]]
Window = list[tuple[float, ...]]


def window_of(
    history: ClusterHistory, node: str, now_s: float, bin_s: float, bins: int
) -> Window | None:
    """(bins, 8) numbers of a working node; None for another one."""
    known = history.nodes.get(node)
    if known is None or known.up_since_s is None:
        return None
    return node_window(
        known, zone_rows(history.zones[known.zone], now_s, bin_s, bins), now_s, bin_s
    )


def zone_rows(zone: ZoneRecord, now_s: float, bin_s: float, bins: int) -> ZoneRows:
    """(lost share, joined share, up share, is known) of each bin: alike for all of its nodes."""
    line, rows = zone.timeline, ZoneRows()
    times = list(map(attrgetter("t_s"), line))
    at = bisect_right(times, now_s - bins * bin_s)
    up = line[at - 1].up if at else (line[0].up - line[0].joined + line[0].lost if line else 0)
    for index in range(bins):
        end = now_s - (bins - 1 - index) * bin_s
        until = bisect_right(times, end, lo=at)
        lost = sum(instant.lost for instant in line[at:until])
        joined = sum(instant.joined for instant in line[at:until])
        before = max(1, up)
        up = line[until - 1].up if until else up
        is_known = 1.0 if until or up else 0.0
        rows.append(
            (min(1.0, lost / before), min(1.0, joined / before), up / max(1, zone.peak), is_known)
        )
        at = until
    return rows


def node_window(node: NodeRecord, rows: ZoneRows, now_s: float, bin_s: float) -> Window:
    """The window of one working node from its zone's rows."""
    out, times = Window(), node.loss_times_s
    since = now_s if node.up_since_s is None else node.up_since_s
    first = now_s - len(rows) * bin_s
    at = bisect_right(times, first)
    for index, (lost, joined, up, is_known) in enumerate(rows):
        end = first + (index + 1) * bin_s
        until = bisect_right(times, end, lo=at)
        age = max(0.0, end - since)
        works = 1.0 if end >= since else 0.0
        own = log1p(until - at)
        long = min(2.0, age / (48 * bin_s))
        out.append((lost, joined, up, works, own, log1p(age / bin_s) / 10, long, is_known))
        at = until
    return out
