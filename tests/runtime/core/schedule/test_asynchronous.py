"""Windows of the asynchronous schedules: complete over the steps, without idle time, and with as
many versions of the weights as the papers say."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from holdfast.core.schedule.check import check_schedule
from holdfast.core.schedule.step_window import look_ahead, steady_window, step_window
from holdfast.core.schedule.table import Action, ActionKind, actions_of
from holdfast.core.schedule.timing import Durations, time_schedule
from holdfast.options.asynchronous.cost import weight_versions


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 8])
def test_no_rank_waits_in_a_step(ranks: int, microbatches: int) -> None:
    window = steady_window("pipedream", ranks, microbatches)
    found = time_schedule(window, Durations.uniform(ranks))
    assert found.makespan == 3 * microbatches
    assert max(found.bubble) < 1e-12
    assert found.in_flight == tuple(max(1, 2 * (ranks - 1 - s)) for s in range(ranks))


@pytest.mark.parametrize("steps", [(4, 4, 4), (1, 3, 2, 1, 1), (8,), (2, 2, 2, 2)])
def test_each_pass_of_each_step_runs_once(steps: tuple[int, ...]) -> None:
    """From an empty pipeline to an empty one, and each step's backwards end with it."""
    ranks = 3
    done: Counter[Action] = Counter()
    starts = [sum(steps[:n]) for n in range(len(steps) + 1)]
    before = 0
    for first, last in pairwise(starts):
        after = min(look_ahead(ranks), starts[-1] - last)
        window = step_window("pipedream", ranks, last - first, before, after)
        check_schedule(window)
        for row in window.actions:
            for action in (a for cell in row for a in actions_of(cell)):
                done[Action(action.stage, action.kind, action.microbatch + first)] += 1
        for stage in range(ranks):
            assert all(done[Action(stage, ActionKind.BACKWARD, m)] for m in range(last))
        before = after
    assert set(done.values()) == {1}
    assert len(done) == 2 * ranks * starts[-1]


def test_versions_are_those_of_the_papers() -> None:
    """pipedream: p - stage, with the two microbatches of a step that it needs at least."""
    assert [weight_versions(4, stage, 2) for stage in range(4)] == [4, 3, 2, 1]
    assert [weight_versions(4, stage, 8) for stage in range(4)] == [2, 2, 2, 1]
    for ranks in range(2, 9):
        for microbatches in range(2, 20):
            for stage in range(ranks):
                assert weight_versions(ranks, stage, microbatches) <= ranks - stage
