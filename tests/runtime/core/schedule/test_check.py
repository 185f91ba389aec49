"""The checker against exhaustive search on small tables; what it says about broken ones."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.schedule.check import check_schedule, execution_order
from holdfast.core.schedule.csv import from_csv
from holdfast.core.schedule.table import (
    Action,
    OverlappedActions,
    Schedule,
    ScheduleCell,
    ScheduleError,
)
from holdfast.errors import LayoutError
from tests.support.schedules import (
    B,
    F,
    I,
    W,
    is_complete,
    may_run,
    parts,
    random_table,
    runs_to_the_end,
    with_row,
)

randoms = st.randoms(use_true_random=False)
# stages, ranks, microbatches
shapes = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)).map(
    lambda s: (max(s[0], s[1]), s[1], s[2])
)


def passes(schedule: Schedule) -> bool:
    try:
        check_schedule(schedule)
    except ScheduleError:
        return False
    return True


def refusal(schedule: Schedule) -> str:
    with pytest.raises(ScheduleError) as refused:
        check_schedule(schedule)
    return str(refused.value)


def table(*rows: str) -> Schedule:
    return from_csv("\n".join(rows), "t")


@settings(max_examples=150, deadline=None)
@given(randoms, shapes, st.booleans())
def test_valid_tables_pass(random: Random, shape: tuple[int, int, int], backward: bool) -> None:
    schedule = random_table(random, *shape, backward=backward)
    check_schedule(schedule)
    assert schedule.has_backward == backward


@settings(max_examples=250, deadline=None)
@given(randoms, shapes, st.integers(1, 3))
def test_swapped_tables_are_judged_as_exhaustive_search_judges_them(
    random: Random, shape: tuple[int, int, int], swaps: int
) -> None:
    schedule = random_table(random, *shape)
    for _ in range(swaps):
        rank = random.randrange(schedule.ranks)
        row = list(schedule.actions[rank])
        one, other = random.randrange(len(row)), random.randrange(len(row))
        row[one], row[other] = row[other], row[one]
        schedule = with_row(schedule, rank, row)
    assert passes(schedule) == runs_to_the_end(schedule)


@settings(max_examples=150, deadline=None)
@given(randoms, shapes)
def test_overlapped_neighbours_are_judged_as_exhaustive_search_judges_them(
    random: Random, shape: tuple[int, int, int]
) -> None:
    schedule = random_table(random, *shape)
    for rank, row in enumerate(schedule.actions):
        merged: list[ScheduleCell] = []
        for cell in row:
            if merged and isinstance(merged[-1], Action) and random.random() < 0.3:
                merged[-1] = OverlappedActions((*parts(merged[-1]), *parts(cell)))
            else:
                merged.append(cell)
        schedule = with_row(schedule, rank, merged)
    assert passes(schedule) == runs_to_the_end(schedule)


@settings(max_examples=250, deadline=None)
@given(randoms, shapes)
def test_damaged_tables_are_incomplete(random: Random, shape: tuple[int, int, int]) -> None:
    """Drop, repeat, relabel or move one action: the checker agrees with a plain count."""
    schedule = random_table(random, *shape)
    rank = random.randrange(schedule.ranks)
    row = list(schedule.actions[rank])
    at = random.randrange(len(row))
    action = parts(row[at])[0]
    match random.randrange(4):
        case 0:
            del row[at]
        case 1:
            row.insert(random.randrange(len(row)), action)
        case 2:
            row[at] = Action(action.stage, random.choice((F, B, I, W)), action.microbatch)
        case 3:
            row[at] = Action(
                random.randrange(schedule.stages + 1),
                action.kind,
                random.randrange(schedule.microbatches + 1),
            )
    damaged = with_row(schedule, rank, row)
    assert passes(damaged) == (is_complete(damaged) and runs_to_the_end(damaged))


@settings(max_examples=100, deadline=None)
@given(randoms, shapes)
def test_execution_is_an_order_in_which_everything_can_run(
    random: Random, shape: tuple[int, int, int]
) -> None:
    schedule = random_table(random, *shape)
    done: set[Action] = set()
    rows: list[list[ScheduleCell]] = [[] for _ in range(schedule.ranks)]
    for rank, cell in execution_order(schedule):
        assert all(may_run(action, done, schedule.stages) for action in parts(cell))
        done |= set(parts(cell))
        rows[rank].append(cell)
    assert tuple(map(tuple, rows)) == schedule.actions


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (["0F0,0B0", "1F0"], "stage 1 needs B, or I and W, of microbatch 0, and has none of them"),
        (["0F0,0I0"], "stage 0 needs B, or I and W, of microbatch 0, and has I"),
        (
            ["0F0,0I0,0W0,0B0"],
            "stage 0 needs B, or I and W, of microbatch 0, and has B and I and W",
        ),
        (["0F0,0F1,0B0,0B1", "1F0,1B0"], "1F1 is missing"),
        (["0B0", "1F0,1B0"], "0F0 is missing"),
        (["0F0,0F0"], "rank 0 runs 0F0 twice"),
        (["0F0,1F0,0B0", "2F0,2B0,1B0"], "rank 1 runs 1B0, but rank 0 holds stage 1"),
        (["0F0,0B0", "", "1F0,1B0"], "rank 1 holds no stage"),
        (["0B0,0F0"], "rank 0 runs 0B0 before 0F0, which it needs"),
        (["0F0,0W0,0I0"], "rank 0 runs 0W0 before 0I0, which it needs"),
        (["1F0,0F0"], "rank 0 runs 1F0 before 0F0, which it needs"),
        (
            ["(0F0;0B0)OVERLAP_F_B"],
            "rank 0 overlaps (0F0;0B0)OVERLAP_F_B, of which one action needs another (0F0)",
        ),
        (
            ["(0F0)OVERLAP_F_B,0B0"],
            "rank 0 overlaps (0F0)OVERLAP_F_B, which is fewer than two actions",
        ),
        (
            ["0F0,0B0,0F1,0B1", "1F0,1F1,1B0,1B1"],
            "deadlock: rank 0 at 0B0 waits for 1B0 of rank 1, rank 1 at 1F1 waits for 0F1 of "
            "rank 0",
        ),
        (
            ["0F0,0B0,3F0,3B0", "1F0,1B0", "2F0,2B0"],
            "deadlock: rank 0 at 0B0 waits for 1B0 of rank 1, rank 1 at 1B0 waits for 2B0 of "
            "rank 2, rank 2 at 2B0 waits for 3B0 of rank 0",
        ),
    ],
)
def test_the_sentence_names_the_action(rows: Sequence[str], sentence: str) -> None:
    assert refusal(table(*rows)) == f"schedule t: {sentence}"


@pytest.mark.parametrize(
    ("schedule", "sentence"),
    [
        (
            Schedule("t", 1, (0, 3), ((Action(0, F, 0),),)),
            "stage 1 is on rank 3, but there are 1 ranks",
        ),
        (Schedule("t", 1, (0,), ((Action(4, F, 0),),)), "rank 0 runs 4F0, but there are 1 stages"),
        (
            Schedule("t", 1, (0,), ((Action(0, F, 1),),)),
            "rank 0 runs 0F1, but there are 1 microbatches",
        ),
        (Schedule("t", 0, (0,), ((),)), "it has no microbatch, no stage or no rank"),
        (Schedule("t", 1, (), ()), "it has no microbatch, no stage or no rank"),
    ],
)
def test_places_that_do_not_exist(schedule: Schedule, sentence: str) -> None:
    assert refusal(schedule) == f"schedule t: {sentence}"


def test_a_broken_schedule_is_a_mistake_of_the_layout() -> None:
    with pytest.raises(LayoutError) as refused:
        check_schedule(table("0B0,0F0"))
    assert refused.value.exit_code == 2
