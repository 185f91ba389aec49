"""Questions to a predictor, from a trace: one for each working node at each moment. Pure.

At t = 0, h, 2h, ... each working node is one sample: will it be lost within the horizon h? If
a node worked at the moment before its loss, the loss is in exactly one sample.

Three cases are censored, and are no sample. The node leaves within the horizon without a failure.
The horizon reaches beyond the end. It overlaps a gap of which nothing is known.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from holdfast.errors import DataError
from holdfast.policy.prediction.bilstm import Window, ZoneRows, node_window, zone_rows
from holdfast.policy.prediction.history import ClusterHistory, NodeChange, NodeSignals
from holdfast_lab.traces.events import EventStream

WINDOW_BINS = 24
BINS_PER_HORIZON = 2
HALF_LIVES_IN_HORIZONS = (2.0, 12.0, 72.0)
MOST_SAMPLES = 3_000_000
"""Samples of one trace: with more, the memory of a usual machine does not last."""
MEMORY_IN_HORIZONS = WINDOW_BINS / BINS_PER_HORIZON + 1


@dataclass(frozen=True, slots=True)
class Sample:
    """One question and its answer. lead_s: seconds until the loss; None without one."""

    t_s: float
    node: str
    signals: NodeSignals
    window: Window
    lead_s: float | None

    @property
    def is_lost(self) -> bool:
        return self.lead_s is not None


@dataclass(frozen=True)
class SampleSet:
    """Samples of one trace or several. losses: all of that time, also of nodes that joined and
    were lost between two moments, which no sample can foresee."""

    samples: tuple[Sample, ...]
    losses: int

    def __add__(self, other: SampleSet) -> SampleSet:
        return SampleSet(self.samples + other.samples, self.losses + other.losses)


def changes_of(stream: EventStream) -> tuple[NodeChange, ...]:
    """Joins, losses and departures of a stream. A stay of a device that ends without an event was
    moved: it left."""
    out = []
    is_moved = stream.header.trace == "stays"
    slow: set[str] = set()
    for event in stream.events:
        kind, node, zone = event.kind, event.node, event.zone
        if kind == "join" or (kind == "recover" and node not in slow):
            out.append(NodeChange(event.t_s, "join", node, zone))
        elif kind == "recover":
            slow.discard(node)
        elif kind == "slow":
            slow.add(node)
        elif kind == "fail" or (kind == "preempt" and not event.extra.get("stopped")):
            left = is_moved and kind == "preempt"
            out.append(NodeChange(event.t_s, "left" if left else "lost", node, zone))
        elif kind == "preempt":
            out.append(NodeChange(event.t_s, "left", node, zone))
    return tuple(out)


def take_samples(
    stream: EventStream,
    horizon_s: float,
    start_s: float = 0.0,
    stop_s: float | None = None,
    every_nth: int = 1,
) -> SampleSet:
    """The samples whose horizon lies within [start_s, stop_s]. Everything before start_s is known
    to the predictor. every_nth: only so many of the nodes are asked about; their losses alone
    count, and the zone's signals are of all nodes."""
    changes = changes_of(stream)
    stop = stream.seconds if stop_s is None else min(stop_s, stream.seconds)
    asked = {
        name
        for place, name in enumerate(dict.fromkeys(change.node for change in changes))
        if place % every_nth == 0
    }
    # Seconds that the asked nodes work between two times; at least those between the times.
    total, since = 0.0, dict[str, float]()
    for change in changes:
        if change.kind == "join":
            since.setdefault(change.node, max(change.t_s, start_s))
        elif change.node in since:
            begun = since.pop(change.node)
            total += max(0.0, min(change.t_s, stop) - begun) if change.node in asked else 0.0
    total += sum(max(0.0, stop - begun) for node, begun in since.items() if node in asked)
    expected = max(total, stop - start_s) / horizon_s
    if expected > MOST_SAMPLES:
        raise DataError(
            f"a horizon of {horizon_s:g} s gives {expected:,.0f} samples",
            where=stream.header.source or "trace",
            remedy=f"give a --horizon of {ceil(horizon_s * expected / MOST_SAMPLES)} or more, or "
            "ask about fewer nodes with --every-nth",
        )
    ends = _departures(changes)
    history = ClusterHistory(
        tuple(share * horizon_s for share in HALF_LIVES_IN_HORIZONS), MEMORY_IN_HORIZONS * horizon_s
    )
    samples, at = list[Sample](), 0
    times = [change.t_s for change in changes]
    for now in _moments(horizon_s, start_s, stop, stream.header.gaps):
        until = bisect_right(times, now, lo=at)
        history = history.update(changes[at:until])
        at = until
        samples += _ask(history, asked, ends, now, horizon_s)
    losses = sum(c.kind == "lost" and start_s < c.t_s <= stop and c.node in asked for c in changes)
    return SampleSet(tuple(samples), losses)


def _departures(changes: Sequence[NodeChange]) -> dict[str, list[tuple[float, bool]]]:
    """node -> (time, was lost) of each of its departures, in order."""
    ends: dict[str, list[tuple[float, bool]]] = {}
    for change in changes:
        if change.kind != "join":
            ends.setdefault(change.node, []).append((change.t_s, change.kind == "lost"))
    return ends


def _moments(
    horizon_s: float, start_s: float, stop_s: float, gaps: Sequence[tuple[float, float]]
) -> Iterator[float]:
    index = max(0, int(-(-start_s // horizon_s)))
    while (index + 1) * horizon_s <= stop_s:
        now = index * horizon_s
        if not any(a < now + horizon_s and now < b for a, b in gaps):
            yield now
        index += 1


def _ask(
    history: ClusterHistory,
    asked: set[str],
    ends: dict[str, list[tuple[float, bool]]],
    now: float,
    horizon_s: float,
) -> Iterator[Sample]:
    rows: dict[str, ZoneRows] = {}
    bin_s = horizon_s / BINS_PER_HORIZON
    for node, record in history.nodes.items():
        if node not in asked or record.up_since_s is None:
            continue
        mine = ends.get(node, [])
        place = bisect_left(mine, (now, True)) if mine else 0
        while place < len(mine) and mine[place][0] <= now:
            place += 1
        lead = None
        if place < len(mine) and mine[place][0] <= now + horizon_s:
            if not mine[place][1]:
                continue  # it left: whether it would have been lost is unknown
            lead = mine[place][0] - now
        zone = record.zone
        if zone not in rows:
            rows[zone] = zone_rows(history.zones[zone], now, bin_s, WINDOW_BINS)
        signals = history.signals(node, now)
        assert signals is not None
        yield Sample(now, node, signals, node_window(record, rows[zone], now, bin_s), lead)
