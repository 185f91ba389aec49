"""Finds the records of a journal that still count.

A generation begins from the state after some step. Any work of an older generation beyond that step
was lost with it and repeated. Those records stay in the journal as the visible cost of a failure,
but are not part of the run's history.

Survivors report the last steps and the newest validation again, for a rank 0 that may have been
lost before its report. A line that repeats an earlier one is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast.events import Evaluated, Event, GenerationStarted, Record, StepDone


def start_steps(records: Iterable[Record]) -> dict[int, int]:
    """generation -> the step from whose state it began."""
    return {r.generation: r.event.step for r in records if isinstance(r.event, GenerationStarted)}


def split_effective(records: Iterable[Record]) -> tuple[list[Record], list[Record]]:
    """(effective, superseded), each in the order given. Records of no generation are effective.

    The start of a generation may be lost with the agent that had to write it. Its records then
    count up to the step from which any later generation began.
    """
    everything = list(records)
    starts = start_steps(everything)
    # generation -> the last step of it that still counts (infinity for the newest).
    bound: float = float("inf")
    bounds: dict[int, float] = {}
    for generation in sorted(starts, reverse=True):
        bounds[generation] = bound
        bound = min(bound, starts[generation])
    for unknown in {r.generation for r in everything} - starts.keys() - {0}:
        later = min((g for g in starts if g > unknown), default=None)
        bounds[unknown] = float("inf") if later is None else min(bounds[later], starts[later])
    effective: list[Record] = []
    superseded: list[Record] = []
    for record in everything:
        inside = record.event.step <= bounds.get(record.generation, float("inf"))
        (effective if inside else superseded).append(record)
    return effective, superseded


_MAX_REMEMBERED_STEPS = 4096  # steps; those that are reported again are the last few


class DuplicateFilter:
    """Leaves out steps and validations that are reported again. Feed it a journal's records in
    order, in as many pieces as they come.

    A generation's own steps come after the one that it began from. An earlier step is of an older
    generation, and new only if none of those had reported it.
    """

    def __init__(self, all_starts: bool = True) -> None:
        """all_starts: every generation's start is fed. Otherwise a step that an older generation
        reported counts as lost if a generation in between is not known."""
        self._all_starts = all_starts
        self._starts: dict[int, int] = {}
        # Kind and step of a recent report -> the newest generation that reported it.
        self._reported_in: dict[tuple[str, int], int] = {}

    def __call__(self, records: Sequence[Record]) -> list[Record]:
        self._starts |= start_steps(records)
        return [record for record in records if self.is_new(record.generation, record.event)]

    def is_new(self, generation: int, event: Event) -> bool:
        """Return True if an event of `generation` is not a repetition; it counts as reported
        now."""
        if isinstance(event, GenerationStarted):
            self._starts[generation] = event.step
        if not isinstance(event, StepDone | Evaluated):
            return True
        step, what = event.step, (event.kind, event.step)
        before = self._reported_in.pop(what, None)
        self._reported_in[what] = generation if before is None else max(before, generation)
        if len(self._reported_in) > _MAX_REMEMBERED_STEPS:
            del self._reported_in[next(iter(self._reported_in))]
        older = step <= self._starts.get(generation, -1)
        return not older or before is None or self._was_step_lost(step, before, generation)

    def _was_step_lost(self, step: int, told: int, now: int) -> bool:
        """Return True if a step that one generation reported was lost before another."""
        between = range(told + 1, now + 1)
        if not self._all_starts and any(g not in self._starts for g in between):
            return True
        return any(self._starts[g] < step for g in between if g in self._starts)
