"""How a node names a hung worker to the coordinator."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

NOBODY = -1
"""Of all ranks: they stand still, and nothing says for whom they wait."""


_STEP_BITS = 32


_ALL_MARKS = (1 << _STEP_BITS) - 1  # whoever holds has passed all points of its step


@dataclass(frozen=True)
class Blame:
    """Who is given up, where it stood, and why. sign: stopped, silent, behind, progress; stuck, of
    nobody."""

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
