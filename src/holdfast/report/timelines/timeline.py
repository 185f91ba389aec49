"""The timeline of a run: traced steps of all ranks and the journal's records, on one clock."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from holdfast.core.spans import CONTROL, VOTE, TraceSpan, chrome_trace
from holdfast.events import (
    CheckpointCaptured,
    CheckpointCommitted,
    CheckpointRestored,
    Evaluated,
    Event,
    GenerationStarted,
    NonFinite,
    Record,
    StepDone,
    StepTraced,
    WorkerLost,
    WorkerReady,
)
from holdfast.report.timelines.clocks import Alignment, align_clocks

_TIMED = (CheckpointCaptured, CheckpointRestored, WorkerReady, Evaluated, CheckpointCommitted)
"""Events with `seconds` that end when they are written."""
_INSTANTS = (GenerationStarted, WorkerLost, NonFinite)


@dataclass(frozen=True)
class RunTimeline:
    """Rows are ranks on nodes, and the agents of nodes. A refused node has none."""

    rows: Mapping[str, list[TraceSpan]] = field(default_factory=dict)
    alignment: Alignment = field(default_factory=Alignment)
    refused: Mapping[str, str] = field(default_factory=dict)  # row -> why it is left out
    unplaced: int = 0  # records of aligned nodes whose agents reported no traced step

    def to_chrome(self) -> dict[str, Any]:
        """Return the file that Perfetto, speedscope and chrome://tracing open."""
        rows = dict(enumerate(self.rows.values()))
        return chrome_trace(rows, dict(enumerate(self.rows)))


def build_timeline(records: Iterable[Record]) -> RunTimeline:
    """Put the records of a run on one clock. There are no rows if no step was traced."""
    records = list(records)
    nodes = {
        record.generation: tuple(record.event.topology.get("nodes", ()))
        for record in records
        if isinstance(record.event, GenerationStarted)
    }
    traced = [
        (record, record.event, _node_of_rank(nodes, record.generation, record.event.rank))
        for record in sorted(records, key=lambda record: record.order)
        if isinstance(record.event, StepTraced)
    ]
    if not traced:
        return RunTimeline()
    first = next((each for each in traced if each[1].rank == 0), traced[0])
    alignment = align_clocks(_vote_ends(traced), first[2])
    rows: dict[str, list[TraceSpan]] = {}
    refused: dict[str, str] = {}
    for _, event, node in sorted(traced, key=lambda each: (each[1].rank, each[2])):
        row, clock = f"rank {event.rank} on {node}", alignment.clocks.get(node)
        if clock is None:
            refused[row] = alignment.refused[node]
            continue
        rows.setdefault(row, []).extend(
            TraceSpan(track, name, clock.to_reference(start), clock.to_reference(stop))
            for track, name, start, stop in event.spans
        )
    shifts, unplaced = _agent_shifts(traced), 0
    for record in records:
        spans = _spans_of(record.event)
        node = _node_of_writer(nodes, record) if spans else ""
        clock = alignment.clocks.get(node)
        if not spans or clock is None:
            continue
        shift = _shift_of(shifts, node, record.generation)
        if shift is None:
            unplaced += 1
            continue
        end = clock.to_reference(record.time - shift)
        rows.setdefault(f"agent of {node}", []).extend(
            TraceSpan(track, name, end - long, end - late) for track, name, long, late in spans
        )
    return RunTimeline(rows, alignment, refused, unplaced)


def _vote_ends(
    traced: Iterable[tuple[Record, StepTraced, str]],
) -> dict[str, dict[Hashable, float]]:
    """Return by node when the vote of each traced step ended, the median of its ranks."""
    said: dict[str, dict[Hashable, list[float]]] = {}
    for record, event, node in traced:
        own = said.setdefault(node, {})
        for track, name, _, stop in event.spans:
            if (track, name) == (CONTROL, VOTE):
                own.setdefault((record.generation, event.step), []).append(stop)
    return {node: {key: median(stops) for key, stops in own.items()} for node, own in said.items()}


def _agent_shifts(traced: Iterable[tuple[Record, StepTraced, str]]) -> dict[str, dict[int, float]]:
    """Return by node and generation the seconds that its agent's clock is ahead of its ranks'.

    An agent stamps a record after the last span of its step, so the least difference is the one."""
    shifts: dict[str, dict[int, float]] = {}
    for record, event, node in traced:
        if event.spans:
            shift = record.time - max(span[3] for span in event.spans)
            own = shifts.setdefault(node, {})
            own[record.generation] = min(own.get(record.generation, shift), shift)
    return shifts


def _shift_of(
    shifts: Mapping[str, Mapping[int, float]], node: str, generation: int
) -> float | None:
    """Return the shift of the nearest generation: an agent keeps its clock as long as it lives."""
    own = shifts.get(node)
    if not own:
        return None
    return own[min(own, key=lambda each: abs(each - generation))]


def _node_of_rank(nodes: Mapping[int, tuple[str, ...]], generation: int, rank: int) -> str:
    members = nodes.get(generation, ())
    return members[rank] if rank < len(members) else "an unknown node"


def _node_of_writer(nodes: Mapping[int, tuple[str, ...]], record: Record) -> str:
    """Return the node whose agent stamped a record: segments of several nodes have its name."""
    writer, _, node = record.writer.partition(".")
    if node:
        return node
    rank = writer.removeprefix("rank")
    return _node_of_rank(nodes, record.generation, int(rank) if rank.isdecimal() else 0)


def _spans_of(event: Event) -> list[tuple[str, str, float, float]]:
    """Return (track, name, seconds before the record, seconds before it at the end)."""
    if isinstance(event, StepDone):
        spans, left = [("steps", f"step {event.step}", event.seconds, 0.0)], event.seconds
        for phase, seconds in event.phases.items():
            spans.append(("phases", phase, left, max(0.0, left - seconds)))
            left = max(0.0, left - seconds)
        return spans
    if isinstance(event, _TIMED):
        rank = getattr(event, "rank", None)
        whose = "" if rank is None else f" of rank {rank}"
        return [(event.kind.replace("_", " "), f"step {event.step}{whose}", event.seconds, 0.0)]
    if isinstance(event, _INSTANTS):
        reason = getattr(event, "reason", "") or getattr(event, "cause", "")
        what = f"{event.kind} ({reason})" if reason else event.kind
        return [("changes", what.replace("_", " "), 0.0, 0.0)]
    return []
