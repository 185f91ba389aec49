"""What a rank keeps at most under each schedule, from the schedule's own table."""

from __future__ import annotations

import pytest

from holdfast.core.schedule.named import build_schedule
from holdfast.core.schedule.table import ActionKind
from holdfast.core.schedule.timing import max_in_flight
from holdfast.layout import Layout, place_replicas
from holdfast.plan.memory.pass_order import StageBytes, fullest_forward, rank_actions, rank_passes

RANKS, MICROBATCHES = 4, 8
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zbv": 2, "dualpipev": 2}
"""With the stages of a rank."""


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_kept_at_most_is_what_the_table_says(name: str) -> None:
    """Each pass keeps one byte, and as much between the halves of its backward."""
    table = build_schedule(name, RANKS, MICROBATCHES, SCHEDULES[name])
    is_folded = name in ("zbv", "dualpipev")
    layout = Layout(pp=RANKS, stages=(1,) * table.stages, is_folded=is_folded)
    (replica,) = place_replicas([layout], 1, ("node",) * RANKS).replicas
    for pp, most in enumerate(max_in_flight(table)):
        stages = {stage: StageBytes(1, 1) for stage in table.stages_of(pp)}
        assert replica.stages_at(pp) == tuple(stages)
        assert fullest_forward(name, replica, pp, MICROBATCHES, stages) == (most, most)
        actions = rank_actions(name, replica, pp, MICROBATCHES)
        last = list(rank_passes(actions, stages, frozenset()))[-1]
        assert (last.kept_besides, last.in_flight) == (0, 1), "the step's last pass is alone"


def test_gradients_of_a_microbatch_wait_for_the_next_ones_on_each_stage() -> None:
    """The first of two siblings stays, on each of the two stages of a rank, until the second."""
    layout = Layout(pp=2, stages=(1, 1, 1, 1), is_folded=True)
    (replica,) = place_replicas([layout], 1, ("node",) * 2).replicas
    actions = rank_actions("zbv", replica, 0, 2)
    stages = {stage: StageBytes(1, 1) for stage in replica.stages_at(0)}
    found = list(rank_passes(actions, stages, frozenset({0})))
    ends = [each for each in found if each.kind is ActionKind.BACKWARD_WEIGHT]
    assert [each.stays for each in ends].count(True) == 2
    for stage in stages:
        first, second = (each for each in ends if each.stage == stage)
        assert (first.stays, stage in first.waiting) == (True, False)
        assert (second.stays, stage in second.waiting) == (False, True)
