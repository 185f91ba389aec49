"""What is recorded of a disturbed run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from holdfast_lab.chaos.schedule import Draw

NOT_RECOVERED = "not recovered from"
"""The outcome of a fault that a run did not survive."""


@dataclass
class FaultResult:
    """One fault that hit, and its result. seconds: until a step was done after it. named: True if
    the journal names the very process as lost, or the very rank as a NaN's source. None: neither is
    expected."""

    number: int
    fault: str
    point: str
    step: int
    target: str
    generation: int
    outcome: str = ""
    seconds: float = 0.0
    named: bool | None = None


@dataclass
class DisturbedRunReport:
    """The record of a disturbed run. rejected_draws: draws that did not apply, and why.
    unexpected_ends: agents that ended although no fault touched them: node, exit code. cut: why it
    got fewer faults than planned. notes: other remarks."""

    faults: list[FaultResult] = field(default_factory=list)
    rejected_draws: list[dict[str, Any]] = field(default_factory=list)
    unexpected_ends: list[list[Any]] = field(default_factory=list)
    problem: str = ""
    cut: str = ""
    notes: list[str] = field(default_factory=list)

    def reject(self, number: int, draw: Draw, reason: str) -> None:
        """Note that a draw did not apply."""
        self.rejected_draws.append(
            {"number": number, "fault": draw.fault.name, "points": list(draw.points), "why": reason}
        )
