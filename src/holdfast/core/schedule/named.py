"""The tables of the schedules that a run file may name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from holdfast.config.sections.pipeline_schedules import SCHEDULE_KINDS
from holdfast.core.schedule.step_window import steady_window
from holdfast.core.schedule.table import Schedule, forward_only, gpipe, interleaved, one_f_one_b
from holdfast.core.schedule.zero_bubble import dualpipev, zb_h1, zbv
from holdfast.errors import LayoutError, unknown_name

Builder = Callable[[int, int, int], Schedule]


def _in_midst_of_run(name: str) -> Builder:
    """The window of one step of a pipeline that is never emptied."""
    return lambda ranks, microbatches, _: steady_window(name, ranks, microbatches)


SCHEDULES: Mapping[str, Builder] = MappingProxyType(
    {
        "1f1b": one_f_one_b,
        "gpipe": gpipe,
        "interleaved": interleaved,
        "zb-h1": zb_h1,
        "zbv": zbv,
        "dualpipev": dualpipev,
        **{
            name: _in_midst_of_run(name)
            for name, kind in SCHEDULE_KINDS.items()
            if kind.is_asynchronous
        },
        "forward": forward_only,
    }
)
"""Name -> builder from (ranks, microbatches, stages a rank). "forward" is a validation's."""


def build_schedule(name: str, ranks: int, microbatches: int, virtual: int = 1) -> Schedule:
    """The table of schedule `name`; LayoutError, one sentence, where it cannot be.

    virtual: stages a rank; a schedule that has always two takes no notice of 1.
    """
    if name not in SCHEDULES:
        raise unknown_name(LayoutError, "schedule", name, SCHEDULES, "layout.schedule")
    if ranks < 1 or virtual < 1:
        raise LayoutError(
            f"{ranks} ranks with {virtual} stages each are no pipeline",
            where="layout.schedule",
            remedy="use 1 or more of both",
        )
    always = SCHEDULE_KINDS[name].virtual if name in SCHEDULE_KINDS else 0
    if always and virtual not in (1, always):
        raise LayoutError(
            f"the schedule {name} has {'one stage' if always == 1 else f'{always} stages'} a rank, "
            f"not {virtual}",
            where="layout.schedule",
            remedy="use the schedule interleaved or gpipe, or "
            + ("one stage a rank" if always == 1 else f"{always} stages a rank"),
        )
    return SCHEDULES[name](ranks, microbatches, always or virtual)
