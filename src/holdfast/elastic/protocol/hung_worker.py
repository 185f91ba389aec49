"""Reports of stalled and hung workers, between a node and the coordinator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.core.device_progress import GroupProgress, progress_from_json
from holdfast.core.json_parsing import Json, JsonObject

ALL_RANKS = -1
"""In place of a rank: all ranks are stalled, and no report names the rank that they wait for."""


_PROGRESS_COUNT_BITS = 32


# a worker that holds has passed all points of its step
_MAX_PROGRESS_COUNT = (1 << _PROGRESS_COUNT_BITS) - 1


@dataclass(frozen=True)
class HungWorker:
    """A worker that is given up, its position, and the symptom.

    symptom: stopped, silent, behind, device or progress; stuck, for all ranks.
    """

    rank: int
    step: int
    progress_count: int
    symptom: str
    stalled_for_s: float

    def to_json(self) -> list[Json]:
        return [
            self.rank,
            self.step,
            self.progress_count,
            self.symptom,
            round(self.stalled_for_s, 3),
        ]

    @staticmethod
    def from_json(row: Iterable[Any]) -> HungWorker:
        rank, step, marks, sign, seconds = row
        return HungWorker(int(rank), int(step), int(marks), str(sign), float(seconds))

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
class HungWorkers:
    """The workers of a generation that their node must kill."""

    generation: int
    workers: tuple[HungWorker, ...]

    def to_json(self) -> list[Json]:
        return [self.generation, [worker.to_json() for worker in self.workers]]

    @staticmethod
    def from_json(row: Iterable[Any]) -> HungWorkers:
        """Parse the message. Raises TypeError and ValueError if it is malformed."""
        generation, workers = row
        return HungWorkers(int(generation), tuple(HungWorker.from_json(one) for one in workers))


@dataclass(frozen=True)
class StalledWorker:
    """A worker without progress for longer than a step.

    stalled_for_s            seconds since its last progress
    cpu_seconds              CPU time that it has used since; None: not known
    is_waiting               it only waits for other ranks, as a phase or a pause demands
    silent_for_s             seconds since it reported anything
    limit_factor             its phase may take so many times as long as usual
    is_blocked_in_collective by its own report, it sleeps where ranks wait for each other
    device_progress          how far its device is with exchanges
    """

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

    def to_json(self) -> list[Json]:
        return [
            self.rank,
            self.step,
            self.progress_count,
            self.stalled_for_s,
            self.cpu_seconds,
            self.is_waiting,
            self.silent_for_s,
            self.limit_factor,
            self.is_blocked_in_collective,
            *([[each.to_json() for each in self.device_progress]] if self.device_progress else []),
        ]

    @staticmethod
    def from_json(row: Iterable[Any]) -> StalledWorker:
        """Parse a row. Raises TypeError and ValueError if it is malformed."""
        rank, step, count, age, cpu, waits, silent, factor, asleep, *device = row
        return StalledWorker(
            int(rank),
            int(step),
            int(count),
            float(age),
            None if cpu is None else float(cpu),
            bool(waits),
            float(silent),
            float(factor),
            bool(asleep),
            progress_from_json(device[0]) if device else (),
        )


@dataclass(frozen=True)
class StallReport:
    """A node's report on its workers without progress.

    normal_step_s        seconds that a step normally takes; None: not known, or not compared
    lateness_s           seconds by which the agent itself was late
    worker_count         its workers at work
    progress_timeout_s   seconds that it tolerates without progress of any worker
    """

    normal_step_s: float | None
    lateness_s: float
    worker_count: int
    progress_timeout_s: float
    workers: tuple[StalledWorker, ...]

    def to_json(self) -> JsonObject:
        return {
            "normal": self.normal_step_s,
            "late": self.lateness_s,
            "of": self.worker_count,
            "progress": self.progress_timeout_s,
            "ranks": [worker.to_json() for worker in self.workers],
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> StallReport:
        """Parse the message. Raises KeyError, TypeError and ValueError if it is malformed."""
        normal = value["normal"]
        return StallReport(
            None if normal is None else float(normal),
            float(value["late"]),
            int(value["of"]),
            float(value["progress"]),
            tuple(StalledWorker.from_json(row) for row in value["ranks"]),
        )
