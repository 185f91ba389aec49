"""Seconds of a pipeline, by executing its schedule's own table on the durations of its stages.

Each stage has its own durations, each boundary its own link, each rank its own slowness. See
`compiled_schedule.py` for what transfers cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from holdfast.config.sections.pipeline_schedules import SCHEDULE_KINDS
from holdfast.core.schedule.table import ActionKind, loop_stages, v_stages
from holdfast.layout import stages_at
from holdfast.plan.cost.compiled_schedule import compiled
from holdfast.plan.cost.long_pipeline import Pipeline, Times, makespan
from holdfast.plan.cost.workload import PassTimes

_COMPUTED = ("forward", "inputs", "weights", "again")


@dataclass(frozen=True)
class StageTimes:
    """Of one stage and microbatch, in seconds; see `PassTimes`."""

    forward: float
    inputs: float
    weights: float
    again: float
    send: float  # of its output to the next stage
    communication: Mapping[str, float]
    waits: bool = False  # ranks compute nothing while they send or receive

    @property
    def backward(self) -> float:
        return self.again + self.inputs + self.weights

    @cached_property
    def work(self) -> float:
        """Seconds of both passes."""
        return self.forward + self.backward

    def slowed(self, factor: float) -> StageTimes:
        """The same stage on a rank whose computing takes `factor` times as long."""
        if factor == 1:
            return self
        own = {name: factor * getattr(self, name) for name in _COMPUTED}
        sent = {axis: factor * each for axis, each in self.communication.items()}
        return replace(self, **own, communication=sent)

    @staticmethod
    def of(
        layers: Sequence[tuple[PassTimes, int]],
        send: float,
        waits: bool = False,
        fixed: float = 0.0,
    ) -> StageTimes:
        """The stage that holds so many of each of these layers. fixed: seconds of its passes."""
        sent: dict[str, float] = {}
        for layer, number in layers:
            for axis, seconds in (layer.communication or {}).items():
                sent[axis] = sent.get(axis, 0.0) + number * seconds
        forward, inputs, weights, again = (
            sum(n * getattr(layer, name) for layer, n in layers) for name in _COMPUTED
        )
        half = fixed / 2
        return StageTimes(forward + half, inputs + half, weights, again, send, sent, waits)


@dataclass(frozen=True)
class PipelineTime:
    """parts: of the busiest rank; they add up to `seconds`."""

    seconds: float
    parts: Mapping[str, float]


def pipeline_time(
    schedule: str, pp: int, virtual: int, microbatches: int, stages: Sequence[StageTimes]
) -> PipelineTime:
    """stages: in their order, pp x virtual of them."""
    if pp == 1:
        one = stages[0]
        seconds = microbatches * (one.forward + one.backward)
        return PipelineTime(seconds, _parts([one], microbatches, seconds))
    seconds = makespan(Pipeline(schedule, pp, microbatches, virtual), _times(stages))
    is_folded = SCHEDULE_KINDS[schedule].is_folded
    rank_of = v_stages(pp) if is_folded else loop_stages(pp, len(stages) // pp)
    by_rank: list[list[tuple[StageTimes, float]]] = [[] for _ in range(pp)]
    # Seconds of one microbatch in which each stage's rank computes nothing for a transfer.
    waits = [0.0] * len(stages)
    for number in range(len(stages) - 1):
        if stages[number].waits and rank_of[number] != rank_of[number + 1]:
            waits[number] += 2 * stages[number].send
            waits[number + 1] += 2 * stages[number].send
    for stage, wait, rank in zip(stages, waits, rank_of, strict=True):
        by_rank[rank].append((stage, wait))
    busiest = max(by_rank, key=lambda own: sum(s.forward + s.backward + wait for s, wait in own))
    waited = sum(wait for _, wait in busiest)
    own = [stage for stage, _ in busiest]
    return PipelineTime(seconds, _parts(own, microbatches, seconds, waited))


def _times(stages: Sequence[StageTimes]) -> Times:
    works, sends = dict[tuple[int, ActionKind], float](), [0.0]
    for number, stage in enumerate(stages):
        works[number, ActionKind.FORWARD] = stage.forward
        works[number, ActionKind.BACKWARD] = stage.backward
        works[number, ActionKind.BACKWARD_INPUT] = stage.again + stage.inputs
        works[number, ActionKind.BACKWARD_WEIGHT] = stage.weights
        sends += [stage.send, stage.send]
    return Times(works, sends, any(stage.waits for stage in stages))


def in_flight(schedule: str, pp: int, virtual: int, microbatches: int) -> tuple[float, ...]:
    """Microbatches whose activations each rank keeps at once, complete ones: a pass of one of
    several stages of a rank counts as a share."""
    if pp == 1:
        return (1.0,)
    if schedule == "gpipe":
        return (float(microbatches),) * pp
    program = compiled(schedule, pp, min(microbatches, 4 * pp), virtual)
    stages = len(program.rank_of) // pp
    return tuple(number / stages for number in program.in_flight)


_LATE_PASSES = {"zb-h1": (1.0, 1.0), "zbv": (0.5, 1.0), "dualpipev": (0.5, 0.5)}
"""Late passes of the first rank, and how many more each further rank has."""


@lru_cache(maxsize=4096)
def late_passes(schedule: str, pp: int, virtual: int, microbatches: int) -> tuple[float, ...]:
    """Of those, the most that are between the two halves of their backward."""
    if pp == 1 or not SCHEDULE_KINDS[schedule].splits_backward:
        return (0.0,) * pp
    if schedule == "zb-h1" or microbatches >= 2 * pp:  # by formula; a test compares the tables
        first, each = _LATE_PASSES[schedule]
        return tuple(first + each * rank for rank in range(pp))
    program = compiled(schedule, pp, min(microbatches, 4 * pp), virtual)
    stages = len(program.rank_of) // pp
    return tuple(number / stages for number in program.late)


def _parts(
    stages: Sequence[StageTimes], microbatches: int, seconds: float, waits: float = 0.0
) -> dict[str, float]:
    parts: dict[str, float] = {}
    for stage in stages:
        for axis, each in stage.communication.items():
            parts[axis] = parts.get(axis, 0.0) + microbatches * each
    again = microbatches * sum(stage.again for stage in stages)
    busy = microbatches * sum(stage.forward + stage.backward for stage in stages)
    compute = busy - again - sum(parts.values())
    if waits:
        parts["pp"] = max(0.0, min(microbatches * waits, seconds - busy))
    bubble = max(0.0, seconds - busy - parts.get("pp", 0.0))
    return {"compute": compute, "recompute": again, **parts, "bubble": bubble}


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
    """Return the seconds alone.

    A rank is busy for all microbatches. Its first stage can begin when the first microbatch has
    passed all stages before it, and the last gradient must pass them again. With like stages and
    without transfers this is the time of 1F1B itself: (m + p - 1) times a stage.
    """
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
