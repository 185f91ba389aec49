"""Spans of time of a rank's work, their summary for a pipeline, and a trace to look at.

A `SpanRecorder` belongs to one rank and may be written by several of its threads. Times come from
`time.monotonic`, which all processes of one machine share. So spans of ranks on one machine can be
compared. Across machines only lengths mean anything. A span costs about a microsecond, and its name
is what the schedule prints for the action (`1F0`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

COMPUTE = "compute"  # an action of the schedule
RECEIVE = "receive wait"  # an action could have begun, but for what it needs from another rank
REDUCE = "reduce"  # a bucket of the gradient is summed over ranks, during the backward pass
SEND = "send wait"  # a run could have begun, but for the arrival of what the last one sent


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


class _OpenSpan:
    """A span that has begun; written when its block ends, however that ends."""

    __slots__ = ("_name", "_spans", "_start", "_track")

    def __init__(self, spans: list[TraceSpan], track: str, name: str):
        self._spans, self._track, self._name = spans, track, name
        self._start = 0.0

    def __enter__(self) -> None:
        self._start = time.monotonic()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._spans.append(TraceSpan(self._track, self._name, self._start, time.monotonic()))


class SpanRecorder:
    """The spans of one rank, in order of their ends. Appending to a list is atomic in Python."""

    def __init__(self) -> None:
        self.spans: list[TraceSpan] = []

    def span(self, track: str, name: str) -> _OpenSpan:
        """`with recorder.span(COMPUTE, "1F0"): ...`"""
        return _OpenSpan(self.spans, track, name)


@dataclass(frozen=True)
class PipelineMeasurement:
    """A run as it was executed, over all ranks of one pipeline.

    makespan_s: seconds from the first action's begin to the last one's end, over all ranks.
    bubble: per rank, the share of the makespan in which it computed nothing.
    """

    makespan_s: float
    bubble: tuple[float, ...]


def measure_pipeline(spans: Sequence[Sequence[TraceSpan]]) -> PipelineMeasurement:
    """Return a summary of the compute spans of a run (one sequence a rank, on one machine).

    Raises ValueError when no rank computed anything.
    """
    actions = [[s for s in rank if s.track == COMPUTE] for rank in spans]
    every = [s for rank in actions for s in rank]
    if not every:
        raise ValueError("no compute spans: nothing was executed while the recorder was there")
    makespan = max(s.stop for s in every) - min(s.start for s in every)
    bubble = tuple(1.0 - sum(s.seconds for s in rank) / makespan for rank in actions)
    return PipelineMeasurement(makespan, bubble)


def chrome_trace(spans_by_rank: Mapping[int, Sequence[TraceSpan]]) -> dict[str, Any]:
    """A trace for chrome://tracing or ui.perfetto.dev: a process per rank, a row per track.

    The JSON form of Google's "Trace Event Format": complete events ("X") with microseconds
    counted from the first span, metadata events ("M") that name the rows. The compute track
    stands first.
    """
    every = [s for spans in spans_by_rank.values() for s in spans]
    origin = min((s.start for s in every), default=0.0)
    tracks = sorted({s.track for s in every}, key=lambda track: (track != COMPUTE, track))
    events: list[dict[str, Any]] = []
    for rank, spans in sorted(spans_by_rank.items()):
        events.append(_name_event(rank, 0, "process_name", f"rank {rank}"))
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


def _name_event(rank: int, row: int, what: str, text: str) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": row, "name": what, "args": {"name": text}}
