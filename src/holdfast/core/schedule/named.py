"""The schedules that a run file may name, and what each asks of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType

from holdfast.core.schedule.interleaved import interleaved
from holdfast.core.schedule.table import Schedule, forward_only, gpipe, one_f_one_b
from holdfast.core.schedule.zero_bubble import dualpipev, zb_h1, zbv
from holdfast.errors import LayoutError


@dataclass(frozen=True)
class ScheduleKind:
    """One named schedule.

    build: from (ranks, microbatches, stages a rank) to its table.
    least_a_rank: microbatches of a replica, for each rank of its pipeline, that fill it; 0: one
        microbatch is enough.
    virtual: the stages that each rank has; 0: what is asked for.
    is_folded: its stages go down the ranks and up again (a V). Otherwise they go round the ranks.
    splits_backward: gradients of inputs and of weights are two actions.
    """

    build: Callable[[int, int, int], Schedule]
    least_a_rank: int
    virtual: int
    is_folded: bool = False
    splits_backward: bool = False

    def least_microbatches(self, ranks: int) -> int:
        """The microbatches of a replica that fill a pipeline of `ranks`."""
        return max(1, self.least_a_rank * ranks) if ranks > 1 else 1


SCHEDULES: Mapping[str, ScheduleKind] = MappingProxyType(
    {
        "1f1b": ScheduleKind(one_f_one_b, 1, 1),
        "gpipe": ScheduleKind(gpipe, 0, 0),
        "interleaved": ScheduleKind(interleaved, 1, 0),
        "zb-h1": ScheduleKind(zb_h1, 1, 1, splits_backward=True),
        "zbv": ScheduleKind(zbv, 1, 2, is_folded=True, splits_backward=True),
        "dualpipev": ScheduleKind(dualpipev, 2, 2, is_folded=True, splits_backward=True),
        "forward": ScheduleKind(forward_only, 0, 0),
    }
)
"""By the name in the run file; "forward" is a validation's."""


def build_schedule(name: str, ranks: int, microbatches: int, virtual: int = 1) -> Schedule:
    """The table of schedule `name`; LayoutError, one sentence, where it cannot be."""
    if name not in SCHEDULES:
        close = get_close_matches(name, SCHEDULES, n=1)
        known = ", ".join(SCHEDULES)
        raise LayoutError(
            f"there is no schedule {name!r}",
            where="layout.schedule",
            remedy=f"did you mean {close[0]!r}?" if close else f"use one of {known}",
        )
    if ranks < 1 or virtual < 1:
        raise LayoutError(
            f"{ranks} ranks with {virtual} stages each are no pipeline",
            where="layout.schedule",
            remedy="use 1 or more of both",
        )
    kind = SCHEDULES[name]
    return kind.build(ranks, microbatches, kind.virtual if kind.virtual > 1 else virtual)
