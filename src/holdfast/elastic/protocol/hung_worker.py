"""The report of a hung worker, between a node and the coordinator."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

NOBODY = -1
"""In place of a rank: all ranks are stalled, and no report names the rank that they wait for."""


_STEP_BITS = 32


_ALL_MARKS = (1 << _STEP_BITS) - 1  # whoever holds has passed all points of its step


@dataclass(frozen=True)
class Blame:
    """A worker that is given up, its position, and the symptom.

    symptom: stopped, silent, behind or progress; stuck, for all ranks.
    """

    rank: int
    step: int
    marks: int
    sign: str
    seconds: float

    def to_json(self) -> list[Any]:
        return [self.rank, self.step, self.marks, self.sign, round(self.seconds, 3)]

    @staticmethod
    def from_json(row: Iterable[Any]) -> Blame:
        rank, step, marks, sign, seconds = row
        return Blame(int(rank), int(step), int(marks), str(sign), float(seconds))

    def cause(self, phase: str) -> str:
        where = f"in step {self.step}, {phase}"
        match self.sign:
            case "stopped":
                return f"its process was stopped for {self.seconds:.1f} s {where}"
            case "silent":
                return f"not heard for {self.seconds:.1f} s {where}, while others wait for it"
            case "behind":
                return f"no progress for {self.seconds:.1f} s {where}, while others wait for it"
        return f"no progress for {self.seconds:.3g} s {where}"
