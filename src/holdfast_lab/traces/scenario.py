"""What a study changes in a trace: notices, gaps, the places of prices. Pure."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from holdfast.errors import DataError
from holdfast_lab.traces.events import EventStream, TraceEvent, in_order

GapRule = Literal["hold", "cut", "skip"]


@dataclass(frozen=True)
class Notices:
    """What notices get wrong. missed_share: of departures without one. false_per_node_day: notices
    of a node that stays, a day. seed: for which of them, and when."""

    missed_share: float = 0.0
    false_per_node_day: float = 0.0
    seed: int = 0


ALL_TRUE = Notices()


def with_notices(stream: EventStream, seconds: float, notices: Notices = ALL_TRUE) -> EventStream:
    """Each node that is taken has a notice before, at the earliest when it joins."""
    draw = random.Random(f"{notices.seed}/notices")
    joined: dict[str, float] = {}
    added: list[TraceEvent] = []
    stays: list[tuple[TraceEvent, float]] = []
    here: dict[str, TraceEvent] = {}
    for event in stream.events:
        if event.kind == "join":
            joined[event.node] = event.t_s
            here[event.node] = event
        elif event.kind == "preempt" and seconds > 0:
            at = max(event.t_s - seconds, joined.get(event.node, 0.0))
            if event.node in here:
                stays.append((here.pop(event.node), at))
            if at < event.t_s and draw.random() >= notices.missed_share:
                notice = replace(event, t_s=at, kind="notice", value=event.t_s - at, extra={})
                added.append(notice)
    if notices.false_per_node_day and seconds > 0:
        stays += [(event, stream.seconds) for event in here.values()]
        added += _false_notices(stays, seconds, notices.false_per_node_day, draw)
    return EventStream(stream.header, in_order([*stream.events, *added]))


def _false_notices(
    stays: list[tuple[TraceEvent, float]], seconds: float, a_day: float, draw: random.Random
) -> Iterator[TraceEvent]:
    """Notices that no departure follows. stays: joins, and until when a notice would be false."""
    for event, until in stays:
        at = event.t_s + draw.expovariate(a_day / 86_400)
        while at + seconds < until:
            yield replace(event, t_s=at, kind="notice", value=seconds, extra={})
            at += draw.expovariate(a_day / 86_400)


def without_gaps(stream: EventStream, rule: GapRule) -> EventStream:
    """`hold` keeps the state before a gap. `skip` takes the time of gaps out. `cut` keeps only the
    longest part between two gaps, and the nodes that were there at its start."""
    gaps = stream.header.gaps
    if rule == "hold" or not gaps:
        return stream
    if rule == "cut":
        edges = [0.0, *(time for gap in gaps for time in gap), stream.seconds]
        parts = list(zip(edges[::2], edges[1::2], strict=True))
        start, stop = max(parts, key=lambda part: part[1] - part[0])
        return stream_part(stream, start, stop)
    ends = [stop for _, stop in gaps]
    lost = [0.0]
    for start, stop in gaps:
        lost.append(lost[-1] + stop - start)
    events = [replace(e, t_s=e.t_s - lost[bisect_right(ends, e.t_s)]) for e in stream.events]
    header = replace(stream.header, gaps=(), seconds=stream.seconds - lost[-1])
    return EventStream(header, in_order(events))


def stream_part(stream: EventStream, start: float, stop: float) -> EventStream:
    """The events of (start, stop], after the state at its start."""
    state: dict[tuple[str, ...], TraceEvent] = {}
    later = []
    for event in stream.events:
        if event.t_s > stop:
            break
        if event.t_s > start:
            later.append(replace(event, t_s=event.t_s - start))
        else:
            # Keep what is needed to have the same state: joins of nodes that are there,
            # and the last failure, slowness, link, price and intensity.
            if event.kind in ("preempt", "recover"):
                for kind in ("fail", "slow", *(("join",) if event.kind == "preempt" else ())):
                    state.pop((kind, event.node), None)
            elif event.kind in ("join", "fail", "slow"):
                state[event.kind, event.node] = event
            elif event.kind != "notice":
                state[event.kind, event.node, event.zone, event.gpu] = event
    first = [replace(event, t_s=0.0) for event in state.values()]
    header = replace(stream.header, gaps=(), seconds=stop - start)
    return EventStream(header, in_order([*first, *later]))


# --- places of prices and intensities -------------------------------------------------------------
Place = tuple[str, str]
"""(zone, type of device); "" where none is named."""


def with_known_places(stream: EventStream) -> EventStream:
    """Return the stream with prices and intensities that hold for its nodes. Raises DataError if
    there are several places of them, and no node is in one."""
    nodes = {(e.zone, e.gpu) for e in stream.events if e.kind == "join"} or {("", "")}
    everywhere = set[str]()
    for kind, words, options in (
        ("price", "prices of {} pairs of zone and type of device", "--zone and --gpu"),
        ("carbon", "intensities of {} zones", "--zone"),
    ):
        places = sorted({(e.zone, e.gpu) for e in stream.events if e.kind == kind})
        if not places or any(_holds(place, node) for place in places for node in nodes):
            continue
        if len(places) > 1:
            zone, gpu = places[0]
            example = " ".join(["--zone", repr(zone), *(["--gpu", repr(gpu)] if gpu else [])])
            raise DataError(
                f"the trace has {words.format(len(places))}, and no node is in one of them",
                where=stream.header.source or "trace",
                remedy=f"choose one with {options}, such as {example}",
            )
        everywhere.add(kind)
    if not everywhere:
        return stream
    events = tuple(
        replace(e, zone="", gpu="") if e.kind in everywhere else e for e in stream.events
    )
    return EventStream(stream.header, events)


def _holds(place: Place, node: Place) -> bool:
    """Return True if a price or an intensity of a place holds for a node (`engine/accounts.py`)."""
    return all(mine in ("", its) for mine, its in zip(place, node, strict=True))


def as_long_as_nodes(merged: EventStream, streams: Sequence[EventStream]) -> EventStream:
    """Return the merged stream up to the end of the longest one that has nodes. After it, nothing
    is known of them: a table of prices for a year makes no year of a trace of a day."""
    lengths = [s.seconds for s in streams if any(e.kind == "join" for e in s.events)]
    if not lengths or max(lengths) >= merged.seconds:
        return merged
    return stream_part(merged, 0.0, max(lengths))
