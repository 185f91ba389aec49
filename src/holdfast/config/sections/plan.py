"""The section `plan:` of a run file: what a layout is chosen for, and on which machines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime
from typing import Literal

from pydantic import Field, field_validator

from holdfast.config.sections.base import Section

PlanObjective = Literal[
    "time",
    "tokens_per_usd",
    "tokens_per_kwh",
    "tokens_per_kg_co2",
    "goodput",
    "goodput_per_usd",
    "finish_by",
]
SHORT_CLUSTER = re.compile(r"here|\d+x.+")
"""A cluster that is no file: this machine, or a short form as 16x8xH100-80."""


class PlanConfig(Section):
    """What `layout: auto` and `holdfast plan` choose a layout for
    ([planning.md](../guide/planning.md))."""

    objective: PlanObjective = "time"
    """what the layout is chosen by. time: the shortest step; tokens_per_usd, tokens_per_kwh,
    tokens_per_kg_co2: the most tokens for that. goodput: the most tokens a second, with failures
    counted; goodput_per_usd: for a dollar. finish_by: the cheapest that is expected to be done in
    time"""
    finish_by: str = ""
    """date and time of objective finish_by, as 2026-12-24T18:00"""
    cluster: str = ""
    """the machines: a cluster file, or a short form as 16x8xH100-80; empty: this machine
    ([cluster-file.md](cluster-file.md))"""
    ask_above_usd: float = Field(100, ge=0)
    """`holdfast train` asks before a run that costs more by the plan"""
    memory_share: float = Field(0.95, gt=0, le=1)
    """share of a device's memory that a layout may use"""

    @field_validator("finish_by")
    @classmethod
    def _is_a_time(cls, text: str) -> str:
        try:
            if text:
                datetime.fromisoformat(text)
        except ValueError:
            raise ValueError(f"{text!r} is no date and time: use 2026-12-24T18:00") from None
        return text

    def broken_rules(self) -> Iterator[str]:
        if self.objective == "finish_by" and not self.finish_by:
            yield (
                "objective finish_by needs an end: use plan.finish_by: 2026-12-24T18:00, or "
                "objective: time"
            )

    @property
    def is_short_cluster(self) -> bool:
        """Return True if `cluster` names no file."""
        return SHORT_CLUSTER.fullmatch(self.cluster) is not None
