"""Schedules with several stages a rank, or a split backward: against torch's tables and papers."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as theirs

from holdfast.config.sections.pipeline_schedules import SCHEDULE_KINDS
from holdfast.core.schedule.check import check_schedule
from holdfast.core.schedule.csv import from_csv
from holdfast.core.schedule.named import build_schedule
from holdfast.core.schedule.step_window import look_ahead, steady_window, step_window
from holdfast.core.schedule.table import Action, ActionKind, actions_of
from holdfast.core.schedule.timing import Durations, Timeline, max_in_flight, time_schedule
from holdfast.options.asynchronous.cost import weight_versions
from tests.runtime.core.schedule.test_csv import their_table

SPLIT = ["interleaved", "zb-h1", "zbv", "dualpipev"]


def timed(name: str, ranks: int, microbatches: int) -> Timeline:
    """With F, I and W of equal length, and all schedules of one model: 1 for a rank's forward."""
    table = build_schedule(name, ranks, microbatches, 2 if name == "interleaved" else 1)
    each = table.stages // ranks
    return time_schedule(table, Durations.uniform(table.stages, 1 / each, 2 / each))


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("interleaved", theirs.ScheduleInterleaved1F1B),
        ("zbv", theirs.ScheduleZBVZeroBubble),
        ("dualpipev", theirs.ScheduleDualPipeV),
    ],
)
def test_the_order_is_that_of_torch(name: str, kind: Any, ranks: int) -> None:
    for microbatches in (2 * ranks, 4 * ranks):
        printed = from_csv(their_table(kind, ranks, 2, microbatches), name)
        assert printed == build_schedule(name, ranks, microbatches, 2)


@pytest.mark.parametrize("name", SPLIT)
def test_any_number_of_microbatches_can_run(name: str) -> None:
    """A dealing may leave a replica fewer than fill its pipeline. Gradients of each stage come in
    the order of the microbatches, as the reduction tree counts on."""
    for ranks in (1, 2, 3, 4):
        for microbatches in range(1, 3 * ranks + 2):
            for virtual in (1, 2, 3) if name == "interleaved" else (1,):
                table = build_schedule(name, ranks, microbatches, virtual)
                check_schedule(table)
                for kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT):
                    _assert_in_order(table.actions, kind)


def _assert_in_order(rows: Any, kind: ActionKind) -> None:
    for row in rows:
        seen: dict[int, int] = {}
        for action in (action for cell in row for action in actions_of(cell)):
            if action.kind is kind:
                assert seen.get(action.stage, -1) < action.microbatch
                seen[action.stage] = action.microbatch


def test_bubbles_are_those_of_the_papers() -> None:
    """Idle time of a rank, in forwards. It is (p - 1)(F + B) for 1F1B, and half of it for two
    stages a rank (arXiv 2104.04473, section 2.2). For ZB-H1 it is (p - 1)(F + B - W)
    (arXiv 2401.10241, table 1)."""
    for ranks, microbatches in ((4, 8), (4, 16), (8, 16)):
        idle = {
            name: timed(name, ranks, microbatches).makespan - 3 * microbatches
            for name in ("1f1b", *SPLIT)
        }
        assert idle["1f1b"] == pytest.approx(3 * (ranks - 1))
        assert idle["interleaved"] == pytest.approx(1.5 * (ranks - 1))
        assert idle["zb-h1"] == pytest.approx(ranks - 1)
        assert idle["zbv"] < idle["zb-h1"] < idle["interleaved"] < idle["1f1b"]
        assert idle["dualpipev"] <= idle["zb-h1"] + 1e-9


def test_memory_is_that_of_the_papers() -> None:
    """ZB-H1 keeps what 1F1B's first rank does on every rank; ZBV twice as many stages of half the
    size; DualPipeV one stage more."""
    assert max_in_flight(build_schedule("1f1b", 4, 8)) == (4, 3, 2, 1)
    assert max_in_flight(build_schedule("zb-h1", 4, 8)) == (4, 4, 4, 4)
    assert max_in_flight(build_schedule("zbv", 4, 8)) == (8, 8, 8, 8)
    assert max_in_flight(build_schedule("dualpipev", 4, 8)) == (9, 9, 9, 9)


def test_placements_are_those_of_the_table() -> None:
    for name in SPLIT:
        table = build_schedule(name, 3, 6, 2 if name == "interleaved" else 1)
        is_folded = SCHEDULE_KINDS[name].is_folded
        assert (
            table.rank_of
            == {True: (0, 1, 2, 2, 1, 0), False: (0, 1, 2) * (2 if name == "interleaved" else 1)}[
                is_folded
            ]
        )


# --- windows of the asynchronous schedules --------------------------------------------------------
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
