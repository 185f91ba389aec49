"""The makespan of a step of many microbatches, of which only a few are executed.

Ranks repeat themselves: a table with some more microbatches has the same rows, and each has one
more round in its middle. `_rounds` checks that on the tables. If all times of one round are those
of an earlier round and a constant, then so are all that follow. So each further round costs that
constant, exactly. While they are not, more microbatches are executed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from holdfast.core.schedule.table import ActionKind
from holdfast.plan.cost.compiled_schedule import (
    CompiledSchedule,
    EntryTimes,
    Work,
    compiled,
    run_entries,
)

_TABLES = 3  # tables of about as many microbatches that are compiled to leave microbatches out
_SAME = 1e-11  # share of a makespan by which equal times may differ, by rounding


@dataclass(frozen=True)
class Pipeline:
    """A schedule by name, with the size of its pipeline."""

    schedule: str
    pp: int
    microbatches: int
    virtual: int

    def of(self, microbatches: int) -> CompiledSchedule:
        return compiled(self.schedule, self.pp, microbatches, self.virtual)


@dataclass(frozen=True)
class Times:
    """Durations of a pipeline, in seconds."""

    works: Mapping[tuple[int, ActionKind], float]  # by (stage, kind)
    sends: Sequence[float]  # by link; the first is of no link
    is_blocking: bool = False

    def run(self, program: CompiledSchedule) -> EntryTimes:
        works = self.works
        seconds = [sum(works[action] for action in work) for work in program.works]
        return run_entries(program, seconds, self.sends, self.is_blocking)


def makespan(pipeline: Pipeline, times: Times) -> float:
    """Seconds from the begin of the first action to the end of the last."""
    wanted, pp = pipeline.microbatches, pipeline.pp
    most = (4 if pipeline.virtual == 1 else 6) * pp  # executed at least
    most += (wanted - most) % pp  # the rest is a multiple of pp
    while _TABLES * most < wanted:
        rounds = _rounds(pipeline.schedule, pp, most, pipeline.virtual)
        found = rounds and rounds.repeated(times)
        if rounds and found:
            number, seconds = found  # of rounds, and what they cost together
            whole, more = divmod((wanted - most) // rounds.step, number)
            done = times.run(pipeline.of(most + more * rounds.step)).makespan
            return done + whole * seconds
        most += (most // 2 // pp + 1) * pp
    return times.run(pipeline.of(wanted)).makespan


@dataclass(frozen=True)
class _Rounds:
    """Of a table whose rows have a cut, by rank: a table with `step` more microbatches has one more
    round of `lengths` entries there."""

    program: CompiledSchedule
    step: int
    cuts: tuple[int, ...]
    lengths: tuple[int, ...]
    windows: tuple[int, ...]  # entries before the cut that later ones need
    most: int  # rounds before the cut that are alike, by which times may be compared

    def repeated(self, times: Times) -> tuple[int, float] | None:
        """The rounds after which all times before the cut are the same but for a constant, and that
        constant."""
        found = times.run(self.program)
        small = _SAME * found.makespan
        for rounds in range(1, self.most + 1):
            seconds = self._differ(found, rounds, small)
            if seconds is not None:
                return rounds, seconds
        return None

    def _differ(self, times: EntryTimes, rounds: int, small: float) -> float | None:
        row, cut = self.program.rows[-1], self.cuts[-1] - 1
        seconds = times.stopped[row[cut]] - times.stopped[row[cut - rounds * self.lengths[-1]]]
        for rank, row in enumerate(self.program.rows):
            back = rounds * self.lengths[rank]
            for at in range(self.cuts[rank] - self.windows[rank], self.cuts[rank]):
                one, other = row[at], row[at - back]
                if abs(times.stopped[one] - times.stopped[other] - seconds) > small:
                    return None
                if abs(times.arrived[one] - times.arrived[other] - seconds) > small:
                    return None
        return seconds


@lru_cache(maxsize=512)
def _rounds(schedule: str, pp: int, microbatches: int, virtual: int) -> _Rounds | None:
    """None: the rows do not repeat themselves in this way."""
    step = pp if schedule == "interleaved" else 1
    one, more = (compiled(schedule, pp, m, virtual) for m in (microbatches, microbatches + step))
    cuts, lengths, starts = [], [], []
    for short, long in zip(_marks(one), _marks(more), strict=True):
        length, shifted = len(long) - len(short), [(w, m + step) for w, m in short]
        cut = next((i for i, mark in enumerate(short) if mark != long[i]), len(short))
        start = len(short)
        while start > 0 and long[start - 1 + length] == shifted[start - 1]:
            start -= 1
        if start > cut or length <= 0:
            return None
        cuts.append(cut)
        lengths.append(length)
        starts.append(start)
    # How far before the cut of each rank entries lie that entries after a cut need.
    place = {entry: at for row in more.rows for at, entry in enumerate(row)}
    windows = list(lengths)
    for rank, row in enumerate(more.rows):
        for at in range(cuts[rank], len(row)):
            _, _, needs, *_ = more.entries[row[at]]
            if needs >= 0:
                source, *_ = more.entries[needs]
                windows[source] = max(windows[source], cuts[source] - place[needs])
    most = min(
        min((cut - start) // length, (cut - window) // length)
        for cut, start, length, window in zip(cuts, starts, lengths, windows, strict=True)
    )
    if most < 1:
        return None
    return _Rounds(one, step, tuple(cuts), tuple(lengths), tuple(windows), most)


def _marks(program: CompiledSchedule) -> list[list[tuple[Work, int]]]:
    """What tells the entries of each row apart."""
    return [
        [(program.works[program.entries[e][1]], program.microbatches[e]) for e in row]
        for row in program.rows
    ]
