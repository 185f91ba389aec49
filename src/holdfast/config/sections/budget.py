"""The section `budget:` of a run file: what a run may cost, in all its sessions."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from holdfast.config.sections.base import Section


class BudgetConfig(Section):
    """What the run may cost, with all its sessions ([cost.md](../guide/cost.md))."""

    max_cost: float | None = Field(None, gt=0)
    """US dollars, at the prices of `plan.cluster`; none: no limit"""
    max_node_hours: float | None = Field(None, gt=0)
    """hours of all nodes together; none: no limit"""
    on_exceed: Literal["stop", "ask", "warn"] = "stop"
    """stop: save before the limit, and end with exit code 4. ask: the same, and before it ask for
    `holdfast runs budget`, which raises the limit of a run at work. warn: say it, and continue"""
    warn_at: float = Field(0.8, gt=0, le=1)
    """share of a limit at which the run warns, or asks"""

    @property
    def is_set(self) -> bool:
        return self.max_cost is not None or self.max_node_hours is not None
