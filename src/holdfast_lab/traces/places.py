"""Brings nodes, prices and intensities of several files together. Pure.

A price holds for a type of device in a zone, and an intensity in a zone. Files of nodes seldom name
either. A table with one such place then holds for all nodes; of several, one must be chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from holdfast.errors import DataError
from holdfast_lab.traces.events import EventStream
from holdfast_lab.traces.scenario import stream_part

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
    """Return True if a price or an intensity of a place holds for a node (`engine/meter.py`)."""
    return all(mine in ("", its) for mine, its in zip(place, node, strict=True))


def as_long_as_nodes(merged: EventStream, streams: Sequence[EventStream]) -> EventStream:
    """Return the merged stream up to the end of the longest one that has nodes. After it, nothing
    is known of them: a table of prices for a year makes no year of a trace of a day."""
    lengths = [s.seconds for s in streams if any(e.kind == "join" for e in s.events)]
    if not lengths or max(lengths) >= merged.seconds:
        return merged
    return stream_part(merged, 0.0, max(lengths))
