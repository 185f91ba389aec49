"""Reports of stalled and hung workers, between a node and the coordinator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self

from holdfast.core.device_progress import GroupProgress
from holdfast.core.json_parsing import Json, JsonMessage, JsonRow, Key

ALL_RANKS = -1
"""In place of a rank: all ranks are stalled, and no report names the rank that they wait for."""

_PROGRESS_COUNT_BITS = 32


# a worker that holds has passed all points of its step
_MAX_PROGRESS_COUNT = (1 << _PROGRESS_COUNT_BITS) - 1


@dataclass(frozen=True)
class HungWorker(JsonRow):
    """A worker that is given up, its position, and the symptom.

    symptom: stopped, silent, behind, device or progress; stuck, for all ranks.
    """

    rank: int
    step: int
    progress_count: int
    symptom: str
    stalled_for_s: float

    def to_json(self) -> list[Json]:
        return [*super().to_json()[:-1], round(self.stalled_for_s, 3)]

    def describe(self, phase: str) -> str:
        where = f"in step {self.step}, {phase}"
        match self.symptom:
            case "stopped":
                return f"its process was stopped for {self.stalled_for_s:.1f} s {where}"
            case "silent":
                return f"not heard for {self.stalled_for_s:.1f} s {where}, while others wait for it"
            case "device":
                return (
                    f"its device has not reached an exchange for {self.stalled_for_s:.1f} s "
                    f"{where}, while the devices of other ranks wait in it"
                )
            case "behind":
                return (
                    f"no progress for {self.stalled_for_s:.1f} s {where}, while others wait for it"
                )
        return f"no progress for {self.stalled_for_s:.3g} s {where}"


@dataclass(frozen=True)
class HungWorkers(JsonRow):
    """The workers of a generation that their node must kill."""

    generation: int
    workers: tuple[HungWorker, ...]


@dataclass(frozen=True)
class StalledWorker(JsonRow):
    """A worker without progress for longer than a step.

    stalled_for_s            seconds since its last progress
    cpu_seconds              CPU time that it has used since; None: not known
    is_waiting               it only waits for other ranks, as a phase or a pause demands
    silent_for_s             seconds since it reported anything
    limit_factor             its phase may take so many times as long as usual
    is_blocked_in_collective by its own report, it sleeps where ranks wait for each other
    device_progress          how far its device is with exchanges
    """

    absent_if_default = frozenset({"device_progress"})
    rank: int
    step: int
    progress_count: int
    stalled_for_s: float
    cpu_seconds: float | None
    is_waiting: bool
    silent_for_s: float
    limit_factor: float
    is_blocked_in_collective: bool
    device_progress: tuple[GroupProgress, ...] = ()

    @classmethod
    def from_json(cls, row: Sequence[Any]) -> Self:
        """Parse a row. The values that a newer version adds at its end are dropped."""
        return super().from_json(row[: len(cls.json_fields())])


@dataclass(frozen=True)
class StallReport(JsonMessage):
    """A node's report on its workers without progress.

    normal_step_s        seconds that a step normally takes; None: not known, or not compared
    lateness_s           seconds by which the agent itself was late
    worker_count         its workers at work
    progress_timeout_s   seconds that it tolerates without progress of any worker
    """

    normal_step_s: Annotated[float | None, Key("normal")]
    lateness_s: Annotated[float, Key("late")]
    worker_count: Annotated[int, Key("of")]
    progress_timeout_s: Annotated[float, Key("progress")]
    workers: Annotated[tuple[StalledWorker, ...], Key("ranks")]
