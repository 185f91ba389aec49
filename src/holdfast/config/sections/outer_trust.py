"""The section `outer.trust`: which changes of learners count."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from holdfast.config.sections.base import InPlace, Never, Section


class OuterTrustConfig(Section):
    """Which changes of learners count. An event names each one that is left out, its worker and the
    reason. The learner begins its next round with the state that it had. Each worker gets all
    changes."""

    checks: Never[float] = Field(0.0, ge=0, le=1)
    """part of the learners' rounds that another worker computes again, drawn after all changes were
    sent. A change is left out if one bit differs. Both workers need like processors. If a third one
    has such a processor, it computes the round too, and decides"""
    on_mismatch: InPlace[Literal["leave_out", "stop"]] = "leave_out"
    """after a check that found something else. stop: the run ends and names the worker"""
    norm: Never[float] = Field(0.0, ge=0)
    """a change is left out if its norm is above the median norm times this, or below the median
    norm divided by this. 0: any norm counts"""
    direction: Never[float] = Field(-1.0, ge=-1, lt=1)
    """a change is left out if its cosine to the median of all changes is below this. -1: any
    direction counts"""
    held_out: Never[float] = Field(0.0, ge=0)
    """a change is left out if it raises the loss of another learner's samples by more than this
    part. 0: any change counts"""
    limit: Never[int] = Field(0, ge=0)
    """changes of a learner that are left out before none of its changes counts any more. With
    `checks`, each of its rounds is checked instead, and a check that passes forgives all. 0: no
    limit"""

    @property
    def is_on(self) -> bool:
        """Return True if a change may be left out."""
        return self.checks > 0 or self.norm > 0 or self.direction > -1 or self.held_out > 0

    def broken_rules(self) -> Iterator[str]:
        if 0 < self.norm <= 1:
            yield f"norm {self.norm} leaves out changes of the median norm: use norm 3"
