"""What is known of a pipeline without executing its table: a least time, and what ranks keep.

A rank is busy for all microbatches. Its first stage can begin when the first microbatch has passed
all stages before it, and the last gradient must pass them again. With like stages and without
transfers this is the time of 1F1B itself: (m + p - 1) times a stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from holdfast.config.sections.pipeline_schedules import SCHEDULE_KINDS
from holdfast.layout import stages_at
from holdfast.plan.cost.pipeline_time import PipelineTime, StageTimes, _parts, in_flight


def least_pipeline_time(
    schedule: str, pp: int, virtual: int, microbatches: int, stages: Sequence[StageTimes]
) -> PipelineTime:
    """Return a time of at most that of `pipeline_time`, with the parts of the busiest rank."""
    busy, kind = _busy(schedule, pp, stages), SCHEDULE_KINDS[schedule]
    seconds = least_pipeline_seconds(schedule, pp, microbatches, stages)
    busiest = max(range(pp), key=lambda rank: busy[rank])
    chunks = stages_at(busiest, pp, len(stages), kind.is_folded) if pp > 1 else (0,)
    own = [stages[chunk] for chunk in chunks]
    return PipelineTime(seconds, _parts(own, microbatches, seconds))


def least_pipeline_seconds(
    schedule: str, pp: int, microbatches: int, stages: Sequence[StageTimes]
) -> float:
    """Return the seconds alone."""
    splits, seconds, way = SCHEDULE_KINDS[schedule].splits_backward, 0.0, 0.0
    for busy, first in zip(_busy(schedule, pp, stages), stages, strict=False):
        ends = way + microbatches * busy
        if ends > seconds:
            seconds = ends
        # gradients of weights may fill the way back
        way += first.forward + first.send if splits else first.work + 2 * first.send
    return seconds


def _busy(schedule: str, pp: int, stages: Sequence[StageTimes]) -> list[float]:
    """Seconds of a microbatch on each rank."""
    works = [stage.work for stage in stages]
    if pp == 1:
        return works[:1]
    if len(works) == pp:
        return works
    if SCHEDULE_KINDS[schedule].is_folded:
        return [works[rank] + works[2 * pp - 1 - rank] for rank in range(pp)]
    return [sum(works[rank::pp]) for rank in range(pp)]


@lru_cache(maxsize=4096)
def kept_microbatches(schedule: str, pp: int, virtual: int, microbatches: int) -> tuple[float, ...]:
    """Return what `in_flight` does, by formula. microbatches: at least those that the schedule
    needs."""
    m, ranks = microbatches, range(pp)
    if pp == 1:
        return (1.0,)
    if schedule == "gpipe":
        return (float(m),) * pp
    if schedule == "1f1b":
        return tuple(float(min(m, pp - rank)) for rank in ranks)
    if schedule == "interleaved":
        ahead = (2 * (pp - rank - 1) + (virtual - 1) * pp + 1 for rank in ranks)
        return tuple(_existing(forwards, pp, virtual, m) / virtual for forwards in ahead)
    if schedule == "zb-h1" and m >= pp:
        return (float(pp),) * pp
    if schedule == "zbv" and m >= pp:
        return tuple(min(m + 1 + rank, 2 * pp) / 2 for rank in ranks)
    if schedule == "dualpipev" and m >= 2 * pp:
        return (pp + 0.5,) * pp
    return in_flight(schedule, pp, virtual, m)


def _existing(forwards: int, pp: int, virtual: int, microbatches: int) -> int:
    """Forwards of microbatches that exist, among the first so many of full groups of `pp`."""
    groups, rest = divmod(forwards, pp * virtual)
    found = min(groups * pp, microbatches) * virtual
    last = min(pp, max(0, microbatches - groups * pp))
    turns, more = divmod(rest, pp)
    return found + turns * last + min(more, last)
