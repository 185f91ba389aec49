"""One continuous curve out of a journal, for a reader that may start in the middle.

A generation begins from the state after some step. Steps beyond it were lost and are done again.
Here each step becomes one point. If the tracker can take values back, a step that is done again
replaces the earlier point. If it cannot, the first point stays.

Segments of several writers arrive in any order. So the points of a generation wait until its start
is known. The set of delivered steps tells a late step from a repeated one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.events import (
    Evaluated,
    GenerationStarted,
    Record,
    RunFailed,
    RunFinished,
    RunStopped,
    StepDone,
    TaskEvaluated,
)

TRAIN, VALIDATION = "train", "validation"
TASKS = "tasks/"  # begins the group of a task
_MAX_RANGES = 4096  # Separate ranges that are remembered; the oldest ones are merged


@dataclass(frozen=True)
class Point:
    """The values of one step."""

    group: str  # TRAIN, VALIDATION, or TASKS with the name of a task
    step: int
    values: Mapping[str, float]
    time: float  # seconds since 1970, on the writer's clock


@dataclass(frozen=True)
class Rewind:
    """The points of all steps after `step` no longer count."""

    step: int


Change = Point | Rewind


@dataclass
class StepRanges:
    """A set of steps, as ranges [first, last] in ascending order."""

    ranges: list[list[int]] = field(default_factory=list)

    @property
    def last(self) -> int:
        """Return the largest step; 0 if there is none."""
        return self.ranges[-1][1] if self.ranges else 0

    def __contains__(self, step: int) -> bool:
        return any(first <= step <= last for first, last in reversed(self.ranges))

    def add(self, step: int) -> None:
        if self.ranges and self.ranges[-1][1] + 1 == step:  # nearly always
            self.ranges[-1][1] = step
            return
        merged: list[list[int]] = []
        for first, last in sorted([*self.ranges, [step, step]]):
            if merged and first <= merged[-1][1] + 1:
                merged[-1][1] = max(merged[-1][1], last)
            else:
                merged.append([first, last])
        if len(merged) > _MAX_RANGES:
            merged[:2] = [[merged[0][0], merged[1][1]]]
        self.ranges = merged

    def cut(self, step: int) -> None:
        """Remove all steps after `step`."""
        kept = [[first, min(last, step)] for first, last in self.ranges if first <= step]
        self.ranges = kept


class Curve:
    """Turns records into points and rewinds. `to_json` is all that a later reader needs."""

    def __init__(self, can_rewind: bool, state: Mapping[str, Any] | None = None) -> None:
        """state: what `to_json` returned. Raises KeyError, TypeError or ValueError if it is not."""
        stored = state or {"starts": {}, "delivered": {}}
        self._can_rewind = can_rewind
        self._starts = {int(g): int(step) for g, step in stored["starts"].items()}
        self._newest = max(self._starts, default=0)
        self._delivered = {
            group: StepRanges([[int(a), int(b)] for a, b in stored["delivered"].get(group, [])])
            for group in (TRAIN, VALIDATION, *stored["delivered"])
        }
        self._early: dict[int, list[Record]] = {}  # generation -> points before its start is known
        self.end = "interrupted"
        """How the newest session ended."""

    @property
    def is_waiting(self) -> bool:
        """True if a point waits for its generation's start. It is not part of `to_json`."""
        return bool(self._early)

    @property
    def delivered(self) -> dict[str, int]:
        """Return the last step of each group that has one."""
        return {group: steps.last for group, steps in self._delivered.items() if steps.ranges}

    def to_json(self) -> dict[str, Any]:
        return {
            "starts": {str(generation): step for generation, step in self._starts.items()},
            "delivered": {
                group: [list(pair) for pair in steps.ranges]
                for group, steps in self._delivered.items()
            },
        }

    def observe(self, record: Record) -> list[Change]:
        """Take one record; return what follows from it. Each point counts as delivered."""
        event = record.event
        if isinstance(event, GenerationStarted):
            return self._start(record.generation, event.step)
        if isinstance(event, StepDone | Evaluated | TaskEvaluated):
            if record.generation not in self._starts:
                self._early.setdefault(record.generation, []).append(record)
                return []
            return self._point(record)
        if isinstance(event, RunFinished | RunStopped | RunFailed):
            self.end = event.kind.removeprefix("run_")
        return []

    def take_waiting(self) -> list[Change]:
        """Return the points whose generation's start never came; they count where they are new."""
        early, self._early = self._early, {}
        return [c for g in sorted(early) for record in early[g] for c in self._point(record)]

    def _start(self, generation: int, step: int) -> list[Change]:
        if generation in self._starts:  # read again
            return []
        is_newest = generation > self._newest
        self._newest = max(self._newest, generation)
        self._starts[generation] = step
        self.end = "interrupted"
        found: list[Change] = []
        if is_newest and self._can_rewind:
            if any(steps.last > step for steps in self._delivered.values()):
                found.append(Rewind(step))
            for steps in self._delivered.values():
                steps.cut(step)
        for record in self._early.pop(generation, []):
            found += self._point(record)
        return found

    def _point(self, record: Record) -> list[Change]:
        event = record.event
        assert isinstance(event, StepDone | Evaluated | TaskEvaluated)
        group = TRAIN if isinstance(event, StepDone) else VALIDATION
        if isinstance(event, TaskEvaluated):
            group = TASKS + event.task
        steps = self._delivered.setdefault(group, StepRanges())
        if event.step in steps or self._is_superseded(record):
            return []
        steps.add(event.step)
        values = step_values(record, event)
        return [Point(group, event.step, values, record.time)]

    def _is_superseded(self, record: Record) -> bool:
        """Return True if a later generation began before this record's step."""
        if record.generation >= self._newest:  # nearly always
            return False
        later = [step for g, step in self._starts.items() if g > record.generation]
        return record.event.step > min(later)


def step_values(record: Record, event: StepDone | Evaluated | TaskEvaluated) -> dict[str, float]:
    """Return the values of a step, a validation or a task, by the names that trackers show."""
    if isinstance(event, TaskEvaluated):
        numbers = {event.metric: event.score, **event.metrics}
        return {f"{TASKS}{event.task}/{name}": value for name, value in numbers.items()}
    if isinstance(event, Evaluated):
        found = {"validation/loss": event.loss}
        if event.bits_per_byte is not None:
            found["validation/bits_per_byte"] = event.bits_per_byte
        return found | {f"validation/{name}": value for name, value in event.metrics.items()}
    values = {
        "train/loss": event.loss,
        "train/grad_norm": event.grad_norm,
        "train/learning_rate": event.learning_rate,
        "time/step_seconds": event.seconds,
        "run/generation": float(record.generation),
        **{f"train/{name}": value for name, value in event.metrics.items()},
    }
    if event.seconds > 0:
        values[f"time/{event.unit}_per_second"] = event.tokens / event.seconds
    for kind, (_, exposed) in event.exchanges.items():
        values[f"time/exposed_{kind}_seconds"] = exposed
    return values | {f"time/{name}_seconds": seconds for name, seconds in event.phases.items()}
