"""Seconds of a pipeline, by executing its schedule's own table on the durations of its stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from holdfast.core.schedule.named import build_schedule
from holdfast.core.schedule.table import Schedule
from holdfast.core.schedule.timing import Durations, max_in_flight, time_schedule
from holdfast.plan.cost.workload import PassTimes


@dataclass(frozen=True)
class StageTimes:
    """Of one stage and microbatch, in seconds. send: of its output to the next stage."""

    forward: float
    inputs: float
    weights: float
    again: float
    send: float
    communication: Mapping[str, float]

    @property
    def backward(self) -> float:
        return self.again + self.inputs + self.weights

    @staticmethod
    def of(layers: Sequence[tuple[PassTimes, int]], send: float) -> StageTimes:
        """The stage that holds so many of each of these layers."""
        sent: dict[str, float] = {}
        for layer, number in layers:
            for axis, seconds in (layer.communication or {}).items():
                sent[axis] = sent.get(axis, 0.0) + number * seconds
        return StageTimes(
            sum(n * layer.forward for layer, n in layers),
            sum(n * layer.inputs for layer, n in layers),
            sum(n * layer.weights for layer, n in layers),
            sum(n * layer.again for layer, n in layers),
            send,
            sent,
        )


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
    durations = Durations(
        tuple(stage.forward for stage in stages),
        tuple(stage.backward for stage in stages),
        tuple(stage.again + stage.inputs for stage in stages),
        tuple(stage.weights for stage in stages),
        max(stage.send for stage in stages),
    )
    seconds = _makespan(schedule, pp, virtual, microbatches, durations)
    rank_of = _table(schedule, pp, pp * max(2, virtual), virtual).rank_of
    by_rank = [[s for i, s in enumerate(stages) if rank_of[i] == rank] for rank in range(pp)]
    busiest = max(by_rank, key=lambda own: sum(s.forward + s.backward for s in own))
    return PipelineTime(seconds, _parts(busiest, microbatches, seconds))


def _makespan(
    schedule: str, pp: int, virtual: int, microbatches: int, durations: Durations
) -> float:
    """A long step repeats one round of pp microbatches, so a few rounds are executed, and the rest
    is counted."""
    if microbatches <= 4 * pp:
        table = _table(schedule, pp, microbatches, virtual)
        return time_schedule(table, durations).makespan
    rest = microbatches % pp
    fewer, more = 3 * pp + rest, 4 * pp + rest
    one, other = (
        time_schedule(_table(schedule, pp, number, virtual), durations).makespan
        for number in (fewer, more)
    )
    return other + (microbatches - more) / pp * (other - one)


@lru_cache(maxsize=256)
def _table(schedule: str, pp: int, microbatches: int, virtual: int) -> Schedule:
    return build_schedule(schedule, pp, microbatches, virtual)


def in_flight(schedule: str, pp: int, virtual: int, microbatches: int) -> tuple[float, ...]:
    """Microbatches whose activations each rank keeps at once, complete ones: a pass of one of
    several stages of a rank counts as a share."""
    if pp == 1:
        return (1.0,)
    table = _table(schedule, pp, min(microbatches, 4 * pp), virtual)
    stages = table.stages // pp
    return tuple(number / stages for number in max_in_flight(table))


def _parts(stages: Sequence[StageTimes], microbatches: int, seconds: float) -> dict[str, float]:
    parts: dict[str, float] = {}
    for stage in stages:
        for axis, each in stage.communication.items():
            parts[axis] = parts.get(axis, 0.0) + microbatches * each
    again = microbatches * sum(stage.again for stage in stages)
    busy = microbatches * sum(stage.forward + stage.backward for stage in stages)
    compute = busy - again - sum(parts.values())
    return {"compute": compute, "recompute": again, **parts, "bubble": max(0.0, seconds - busy)}
