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
from holdfast.core.schedule.named import SCHEDULES, build_schedule
from holdfast.core.schedule.step_window import look_ahead, steady_window, step_window
from holdfast.core.schedule.table import (
    Action,
    ActionKind,
    actions_of,
    forward_only,
    gpipe,
    one_f_one_b,
)
from holdfast.core.schedule.timing import Durations, Timeline, max_in_flight, time_schedule
from holdfast.errors import LayoutError
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


# --- the tables of the named schedules, against their definition; what they refuse ----------------
SIZES = [(p, m) for p in (1, 2, 3, 4, 7) for m in (1, 2, 3, 4, 8, 11)]


def written(schedule: object) -> list[str]:
    return [" ".join(map(str, row)) for row in schedule.actions]  # type: ignore[attr-defined]


def test_gpipe_is_all_forwards_then_all_backwards() -> None:
    assert written(gpipe(2, 3)) == ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"]


def test_1f1b_as_in_the_paper() -> None:
    """Narayanan et al., arXiv 2104.04473, figure 4 (bottom): 4 stages, 8 microbatches."""
    assert written(one_f_one_b(4, 8)) == [
        "0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0F6 0B3 0F7 0B4 0B5 0B6 0B7",
        "1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1F6 1B4 1F7 1B5 1B6 1B7",
        "2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2F5 2B4 2F6 2B5 2F7 2B6 2B7",
        "3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5 3F6 3B6 3F7 3B7",
    ]


def test_forward_only_has_no_backward() -> None:
    assert written(forward_only(2, 2)) == ["0F0 0F1", "1F0 1F1"]
    assert not forward_only(2, 2).has_backward
    assert gpipe(2, 2).has_backward


def test_virtual_stages_go_round_the_ranks() -> None:
    schedule = gpipe(2, 2, virtual=2)
    assert written(schedule) == [
        "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
        "1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1",
    ]
    assert schedule.rank_of == (0, 1, 0, 1)
    assert schedule.stages_of(1) == (1, 3)
    assert (schedule.stages, schedule.ranks) == (4, 2)


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_table_of_every_size_can_run(name: str, ranks: int, microbatches: int) -> None:
    if name == "1f1b" and microbatches < ranks:
        with pytest.raises(LayoutError, match=f"1f1b over {ranks} ranks needs at least {ranks} mi"):
            build_schedule(name, ranks, microbatches)
        return
    schedule = build_schedule(name, ranks, microbatches)
    check_schedule(schedule)
    assert schedule.ranks == ranks
    assert schedule.is_open or schedule.microbatches == microbatches


@pytest.mark.parametrize("name", ["gpipe", "forward"])
def test_looped_tables_can_run(name: str) -> None:
    for ranks in (1, 2, 3):
        for virtual in (2, 3):
            check_schedule(build_schedule(name, ranks, 4, virtual))


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "virtual", "start", "offer"),
    [
        ("1f1b", 4, 3, 1, "the schedule 1f1b over 4 ranks needs at least 4", "use 4 or more"),
        ("gpipe", 2, 0, 1, "the schedule gpipe over 2 ranks needs at least 1", "use 1 or more"),
        ("1f1b", 2, 4, 2, "the schedule 1f1b has one stage a rank", "use the schedule interleaved"),
        ("1f1p", 2, 4, 1, "there is no schedule '1f1p'", "use 1f1b"),
        ("zigzag", 2, 4, 1, "there is no schedule 'zigzag'", "use one of 1f1b, gpipe, interl"),
        ("gpipe", 0, 4, 1, "0 ranks with 1 stages each", "use 1 or more of both"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    name: str, ranks: int, microbatches: int, virtual: int, start: str, offer: str
) -> None:
    with pytest.raises(LayoutError) as refused:
        build_schedule(name, ranks, microbatches, virtual)
    assert str(refused.value).startswith(f"layout.schedule: {start}")
    assert str(refused.value).partition("; ")[2].startswith(offer)
