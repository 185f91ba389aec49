"""One step of a layout as a timeline, for `core/schedule/draw.py`."""

from __future__ import annotations

from holdfast.core.schedule.named import build_schedule
from holdfast.core.schedule.table import Schedule
from holdfast.core.schedule.timing import Durations, Timeline, time_schedule
from holdfast.plan.cost.choice import Choice, ReplicaChoice
from holdfast.plan.cost.evaluate import Evaluator, Problem

MOST_DRAWN = 2
"""Rounds of a pipeline that are drawn: a long step repeats them."""


def drawn_microbatches(group: ReplicaChoice) -> int:
    """The microbatches of a replica that are drawn."""
    number = min(group.microbatches, MOST_DRAWN * max(2, group.pp))
    return max(1, number - (number % group.pp if number > group.pp else 0))


def timeline_of(problem: Problem, choice: Choice) -> tuple[Schedule, Timeline]:
    """The passes of the first kind of replica, in milliseconds. Of a long step, its first
    microbatches alone."""
    group = choice.replicas[0]
    number = drawn_microbatches(group)
    virtual = choice.virtual if group.pp > 1 else 1
    schedule = build_schedule(
        choice.schedule if group.pp > 1 else "1f1b", group.pp, number, virtual
    )
    stages = Evaluator(problem).stage_times(choice, group)
    return schedule, time_schedule(
        schedule,
        Durations(
            tuple(1e3 * stage.forward for stage in stages),
            tuple(1e3 * stage.backward for stage in stages),
            tuple(1e3 * (stage.again + stage.inputs) for stage in stages),
            tuple(1e3 * stage.weights for stage in stages),
            1e3 * max(stage.send for stage in stages),
        ),
    )
