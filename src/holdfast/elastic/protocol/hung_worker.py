"""The report of a hung worker, between a node and the coordinator."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

ALL_RANKS = -1
"""In place of a rank: all ranks are stalled, and no report names the rank that they wait for."""


_PROGRESS_COUNT_BITS = 32


# a worker that holds has passed all points of its step
_MAX_PROGRESS_COUNT = (1 << _PROGRESS_COUNT_BITS) - 1


@dataclass(frozen=True)
class HungWorker:
    """A worker that is given up, its position, and the symptom.

    symptom: stopped, silent, behind or progress; stuck, for all ranks.
    """

    rank: int
    step: int
    progress_count: int
    symptom: str
    stalled_for_s: float

    def to_json(self) -> list[Any]:
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
            case "behind":
                return (
                    f"no progress for {self.stalled_for_s:.1f} s {where}, while others wait for it"
                )
        return f"no progress for {self.stalled_for_s:.3g} s {where}"
