"""Spans of time of a rank's work, and the file that viewers of traces open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import inf
from typing import Any

COMPUTE = "compute"  # track of the actions of a schedule
CONTROL, VOTE = "control", "vote"  # track and name of the exchange that ends a step on all ranks


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """`name` took from `start` to `stop` (seconds of the monotonic clock) on `track`."""

    track: str
    name: str
    start: float
    stop: float

    @property
    def seconds(self) -> float:
        return self.stop - self.start


def chrome_trace(
    spans_by_rank: Mapping[int, Sequence[TraceSpan]], names: Mapping[int, str] | None = None
) -> dict[str, Any]:
    """A trace for chrome://tracing or ui.perfetto.dev: a process per rank, a row per track.

    The JSON form of Google's "Trace Event Format": complete events ("X") with microseconds
    counted from the first span, metadata events ("M") that name the rows. The compute track
    stands first. Exchanges that overlap have rows of their own. names: of ranks.
    """
    spans_by_rank = {rank: _in_rows(spans) for rank, spans in spans_by_rank.items()}
    every = [s for spans in spans_by_rank.values() for s in spans]
    origin = min((s.start for s in every), default=0.0)
    tracks = sorted({s.track for s in every}, key=lambda track: (track != COMPUTE, track))
    events: list[dict[str, Any]] = []
    for rank, spans in sorted(spans_by_rank.items()):
        events.append(_name_event(rank, 0, "process_name", (names or {}).get(rank, f"rank {rank}")))
        used = {s.track for s in spans}
        events += [
            _name_event(rank, i, "thread_name", t) for i, t in enumerate(tracks) if t in used
        ]
        for s in spans:
            events.append(
                {
                    "ph": "X",
                    "pid": rank,
                    "tid": tracks.index(s.track),
                    "name": s.name,
                    "cat": s.track,
                    "ts": (s.start - origin) * 1e6,
                    "dur": s.seconds * 1e6,
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _in_rows(spans: Sequence[TraceSpan]) -> list[TraceSpan]:
    """A viewer takes spans of a row for nested, so one that begins in another goes to the next."""
    ends: dict[str, float] = {}
    out = []
    for span in sorted(spans, key=lambda span: span.start):
        rows = (f"{span.track} {n}" if n > 1 else span.track for n in count(1))
        track = next(row for row in rows if ends.get(row, -inf) <= span.start)
        ends[track] = span.stop
        out.append(replace(span, track=track))
    return out


def _name_event(rank: int, row: int, what: str, text: str) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": row, "name": what, "args": {"name": text}}
