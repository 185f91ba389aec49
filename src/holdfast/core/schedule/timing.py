"""Computes when every action of a schedule begins and ends, for given durations.

The model of time: a rank runs one cell of its row after another. A cell begins when the rank is
free and all of the cell's inputs have arrived. A result reaches another rank `send` seconds after
it is ready, while the sender continues. Transfers cost the sender nothing and do not slow each
other down. Begin and end of a cell are then the longest path to it. One pass over the table
computes it exactly, without steps of time and without rounding. (Durations given as integers or
fractions give times that are integers or fractions.)

The **bubble** of a rank is the share of the makespan in which it computes nothing. With p equal
stages and m microbatches, it is (p - 1) / (m + p - 1) for both GPipe and 1F1B. It does not depend
on the cost of a backward (arXiv 1811.06965, section 2.3; arXiv 2104.04473, section 2.2.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from holdfast.core.schedule.check import execution_order
from holdfast.core.schedule.table import (
    Action,
    ActionKind,
    Schedule,
    ScheduleCell,
    ScheduleError,
    actions_of,
    value_produced,
    values_needed,
)


@dataclass(frozen=True)
class Durations:
    """Seconds (or any unit) of every stage's actions, and of one transfer between two ranks.

    `input` and `weight` are the two halves of a split backward; left empty, each takes half of
    `backward`. An overlapped cell takes as long as its parts together: they share one device,
    and what they hide is their transfers.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    input: tuple[float, ...] = ()
    weight: tuple[float, ...] = ()
    send: float = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            given = getattr(self, field.name)
            times: Sequence[float] = given if isinstance(given, tuple) else (given,)
            if any(not 0 <= seconds < float("inf") for seconds in times):
                raise ScheduleError(
                    f"{field.name} takes {', '.join(map(str, times))}",
                    where="durations",
                    remedy="use finite numbers of at least 0",
                )

    @staticmethod
    def uniform(stages: int, forward: float = 1, backward: float = 2, send: float = 0) -> Durations:
        """Every stage alike."""
        return Durations((forward,) * stages, (backward,) * stages, send=send)

    def duration_of(self, action: Action) -> float:
        """Return the duration of `action`."""
        stage, split = action.stage, self.backward[action.stage] / 2
        match action.kind:
            case ActionKind.FORWARD:
                return self.forward[stage]
            case ActionKind.BACKWARD:
                return self.backward[stage]
            case ActionKind.BACKWARD_INPUT:
                return self.input[stage] if self.input else split
            case ActionKind.BACKWARD_WEIGHT:
                return self.weight[stage] if self.weight else split

    def _check(self, stages: int) -> None:
        for field in ("forward", "backward", "input", "weight"):
            count = len(getattr(self, field))
            if count != stages and (count or field in ("forward", "backward")):
                raise ScheduleError(
                    f"{field} has the times of {count} stages, the schedule has {stages}",
                    where="durations",
                    remedy=f"give {stages}",
                )


@dataclass(frozen=True, slots=True)
class ScheduledSpan:
    """One cell of the table in time."""

    cell: ScheduleCell
    start: float
    stop: float


@dataclass(frozen=True)
class Timeline:
    """`spans[rank]` in order; `makespan` from 0 to the end of the last action of all.

    `bubble[rank]` is idle time / makespan. `in_flight[rank]` is the most activations kept at once,
    each of one stage and one microbatch. They are kept from the begin of the forward to the end of
    the backward (of W if it is split). A forward alone keeps its own while it runs.
    """

    spans: tuple[tuple[ScheduledSpan, ...], ...]
    makespan: float
    bubble: tuple[float, ...]
    in_flight: tuple[int, ...]


def time_schedule(schedule: Schedule, durations: Durations) -> Timeline:
    """Time every cell of `schedule`.

    Raises ScheduleError when the table would not run (see `check`), or the durations
    are of another number of stages.
    """
    durations._check(schedule.stages)
    spans: list[list[ScheduledSpan]] = [[] for _ in range(schedule.ranks)]
    # when each value is there, on the rank that made it; those of earlier windows are everywhere
    ready = {made: 0.0 for a in schedule.done if (made := value_produced(a)) is not None}
    early = frozenset(ready)
    for rank, cell in execution_order(schedule):
        start: float = spans[rank][-1].stop if spans[rank] else 0
        for action in actions_of(cell):
            for value in values_needed(action, schedule.stages):
                travels = schedule.rank_of[value.stage] != rank and value not in early
                start = max(start, ready[value] + (durations.send if travels else 0))
        stop = start + sum(durations.duration_of(action) for action in actions_of(cell))
        spans[rank].append(ScheduledSpan(cell, start, stop))
        for action in actions_of(cell):
            made = value_produced(action)
            if made is not None:
                ready[made] = stop
    makespan = max(row[-1].stop for row in spans)
    bubble = tuple(
        1 - sum(span.stop - span.start for span in row) / makespan if makespan else 0.0
        for row in spans
    )
    return Timeline(tuple(map(tuple, spans)), makespan, bubble, max_in_flight(schedule))


def max_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """The most activations that each rank keeps at once; it depends on the order alone."""
    if not schedule.has_backward:
        return (1,) * schedule.ranks
    peaks = []
    for rank, row in enumerate(schedule.actions):
        before = [a.kind for a in schedule.done if schedule.rank_of[a.stage] == rank]
        kept = before.count(ActionKind.FORWARD)
        peak = kept = kept - before.count(ActionKind.BACKWARD)
        for cell in row:
            kinds = [action.kind for action in actions_of(cell)]
            kept += kinds.count(ActionKind.FORWARD)
            peak = max(peak, kept)
            kept -= kinds.count(ActionKind.BACKWARD) + kinds.count(ActionKind.BACKWARD_WEIGHT)
        peaks.append(peak)
    return tuple(peaks)
