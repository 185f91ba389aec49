"""The timer against closed forms, cases worked out by hand, and relaxation on random tables."""

from __future__ import annotations

from fractions import Fraction
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.schedule.csv import from_csv
from holdfast.core.schedule.named import build_schedule
from holdfast.core.schedule.table import (
    Action,
    OverlappedActions,
    Schedule,
    ScheduleError,
    forward_only,
    gpipe,
    one_f_one_b,
)
from holdfast.core.schedule.timing import Durations, max_in_flight, time_schedule
from tests.support.schedules import B, F, I, W, parts, random_table

SIZES = [(p, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, 4, 8, 13) if m >= p]


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("backward", [1, 2, Fraction(7, 3)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_bubble_of_equal_stages(name: str, p: int, m: int, backward: Any) -> None:
    """(p - 1) / (m + p - 1), exactly, on every rank, for any price of the backward."""
    found = time_schedule(build_schedule(name, p, m), Durations.uniform(p, 1, backward))
    assert found.makespan == (m + p - 1) * (1 + backward)
    assert found.bubble == pytest.approx([(p - 1) / (m + p - 1)] * p, abs=1e-15)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_the_peak_of_activations(p: int, m: int) -> None:
    assert max_in_flight(gpipe(p, m)) == (m,) * p
    assert max_in_flight(one_f_one_b(p, m)) == tuple(min(p - rank, m) for rank in range(p))
    assert max_in_flight(forward_only(p, m)) == (1,) * p


def test_gpipe_with_fewer_microbatches_than_ranks() -> None:
    found = time_schedule(gpipe(4, 1), Durations.uniform(4))
    assert (found.makespan, found.bubble) == (12, (0.75,) * 4)


def test_virtual_stages_divide_the_bubble() -> None:
    """With v stages a rank and m = p the wait for the first microbatch is 1/v as long: the
    bubble is (p - 1) / (v m + p - 1) (arXiv 2104.04473, section 2.2.2, in stages' time)."""
    p = m = 4
    for v in (1, 2, 3):
        found = time_schedule(gpipe(p, m, v), Durations.uniform(p * v))
        assert found.bubble == pytest.approx([(p - 1) / (v * m + p - 1)] * p, abs=1e-15)


def test_uneven_stages_by_hand() -> None:
    """Stage 1 takes twice as long: rank 0 waits for it after every microbatch.

    rank 0  F0 F1 . . . . . B0 B0 . . . . B1 B1      0-1, 1-2, 7-9, 13-15
    rank 1  . F0 F0 B0 B0 B0 B0 F1 F1 B1 B1 B1 B1    1-3, 3-7, 7-9, 9-13
    """
    found = time_schedule(one_f_one_b(2, 2), Durations((1, 2), (2, 4)))
    times = [[(span.start, span.stop) for span in row] for row in found.spans]
    assert times == [[(0, 1), (1, 2), (7, 9), (13, 15)], [(1, 3), (3, 7), (7, 9), (9, 13)]]
    assert found.makespan == 15
    assert found.bubble == pytest.approx([9 / 15, 3 / 15], abs=1e-15)
    assert found.in_flight == (2, 1)


def test_a_transfer_delays_the_receiver_alone() -> None:
    """The same, when an activation or gradient arrives half a unit after it was made."""
    found = time_schedule(one_f_one_b(2, 2), Durations((1, 2), (2, 4), send=0.5))
    times = [[(span.start, span.stop) for span in row] for row in found.spans]
    assert times == [
        [(0, 1), (1, 2), (8, 10), (14, 16)],
        [(1.5, 3.5), (3.5, 7.5), (7.5, 9.5), (9.5, 13.5)],
    ]


def test_nothing_travels_between_stages_of_one_rank() -> None:
    schedule = from_csv("0F0,1F0,1B0,0B0", "t")
    assert time_schedule(schedule, Durations.uniform(2, 1, 2, send=100)).makespan == 6


def test_a_split_backward_fills_the_bubble() -> None:
    """W runs where the rank would wait: the stage before goes on after I, half of the backward.

    rank 0  F0 F1 . B0 B0 . B1 B1      rank 1  . F0 I0 W0 F1 I1 W1
    """
    whole = from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1", "t")
    split = from_csv("0F0,0F1,0B0,0B1\n1F0,1I0,1W0,1F1,1I1,1W1", "t")
    late = from_csv("0F0,0F1,0B0,0B1\n1F0,1I0,1F1,1I1,1W0,1W1", "t")
    even = Durations.uniform(2)
    assert [time_schedule(s, even).makespan for s in (whole, split, late)] == [9, 8, 7]
    given_halves = Durations((1, 1), (9, 9), input=(1, 1), weight=(3, 3))
    assert time_schedule(from_csv("0F0,0I0,0W0\n1F0,1I0,1W0", "t"), given_halves).makespan == 7
    # activations are kept until the weights have their gradient
    assert max_in_flight(split) == (2, 1)
    assert max_in_flight(late) == (2, 2)


def test_an_overlapped_cell_takes_its_parts_together() -> None:
    schedule = Schedule(
        "t",
        2,
        (0,),
        (
            (
                Action(0, F, 0),
                OverlappedActions((Action(0, F, 1), Action(0, B, 0))),
                Action(0, B, 1),
            ),
        ),
    )
    found = time_schedule(schedule, Durations.uniform(1))
    assert [(span.start, span.stop) for span in found.spans[0]] == [(0, 1), (1, 4), (4, 6)]
    assert found.in_flight == (2,)


@settings(max_examples=150, deadline=None)
@given(
    st.randoms(use_true_random=False),
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(1, 3),
    st.integers(0, 4),
)
def test_random_tables_and_durations(
    random: Random, ranks: int, more: int, microbatches: int, send: int
) -> None:
    """Begin times by relaxation from zero, until nothing moves, are the timer's."""
    stages = ranks + more
    schedule = random_table(random, stages, ranks, microbatches)
    times = [tuple(random.randrange(6) for _ in range(stages)) for _ in range(4)]
    durations = Durations(times[0], times[1], times[2], times[3], send)
    takes = {F: durations.forward, B: durations.backward, I: durations.input, W: durations.weight}

    def long(action: Action) -> float:
        return takes[action.kind][action.stage]

    begin: dict[Action, float] = {
        a: 0 for row in schedule.actions for cell in row for a in parts(cell)
    }
    moved = True
    while moved:
        moved = False
        for row in schedule.actions:
            free = 0.0
            for cell in row:
                (action,) = parts(cell)
                at = free
                for other in begin:
                    if _feeds(other, action):
                        far = schedule.rank_of[other.stage] != schedule.rank_of[action.stage]
                        at = max(at, begin[other] + long(other) + (send if far else 0))
                moved = moved or at > begin[action]
                begin[action] = at
                free = at + long(action)
    found = time_schedule(schedule, durations)
    for spans in found.spans:
        for span in spans:
            (action,) = parts(span.cell)
            assert (span.start, span.stop) == (begin[action], begin[action] + long(action))
    assert found.makespan == max(begin[a] + long(a) for a in begin)
    busy = [sum(long(a) for cell in row for a in parts(cell)) for row in schedule.actions]
    if found.makespan:
        expected = [1 - time / found.makespan for time in busy]
        assert found.bubble == pytest.approx(expected, abs=1e-12)


def _feeds(other: Action, action: Action) -> bool:
    if other.microbatch != action.microbatch:
        return False
    if action.kind is F:
        return other.kind is F and other.stage == action.stage - 1
    if action.kind is W:
        return other.kind is I and other.stage == action.stage
    return (other.kind is F and other.stage == action.stage) or (
        other.kind in (B, I) and other.stage == action.stage + 1
    )


@pytest.mark.parametrize(
    ("durations", "sentence"),
    [
        (lambda: Durations((1,), (2, 2)), "forward has the times of 1 stages, the schedule has 2"),
        (lambda: Durations((1, 1), ()), "backward has the times of 0 stages"),
        (lambda: Durations((1, 1), (2, 2), input=(1,)), "input has the times of 1 stages"),
        (lambda: Durations((1, -1), (2, 2)), "forward takes 1, -1; use finite numbers of at least"),
        (lambda: Durations((1, 1), (2, 2), send=float("nan")), "send takes nan"),
    ],
)
def test_durations_that_cannot_be(durations: object, sentence: str) -> None:
    with pytest.raises(ScheduleError) as refused:
        time_schedule(gpipe(2, 2), durations())  # type: ignore[operator]
    assert sentence in str(refused.value)


def test_a_table_that_would_wait_forever_has_no_time() -> None:
    with pytest.raises(ScheduleError, match="deadlock"):
        time_schedule(from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", "t"), Durations.uniform(2))
