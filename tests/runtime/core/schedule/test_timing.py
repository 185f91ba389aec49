"""The timer against closed forms, cases worked out by hand, and relaxation on random tables."""

from __future__ import annotations

import re
from fractions import Fraction
from random import Random
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.schedule.csv import from_csv
from holdfast.core.schedule.draw import KIND_STYLES, draw_svg, draw_text
from holdfast.core.schedule.named import build_schedule
from holdfast.core.schedule.table import (
    Action,
    ActionKind,
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


# --- drawings of schedules ------------------------------------------------------------------------
SVG = "{http://www.w3.org/2000/svg}"


def drawn(schedule: Schedule, durations: Durations, columns: int | None = None) -> list[str]:
    return draw_text(schedule, time_schedule(schedule, durations), columns).split("\n")


def picture(schedule: Schedule, durations: Durations) -> ElementTree.Element:
    return ElementTree.fromstring(draw_svg(schedule, time_schedule(schedule, durations)))


def test_text_is_to_scale_with_figures_and_a_legend() -> None:
    assert drawn(one_f_one_b(2, 2), Durations.uniform(2)) == [
        "1f1b: 2 stages on 2 ranks, 2 microbatches, makespan 9, bubble 33.3%",
        "rank 0  F0 F1 ......B0--- ...B1---   bubble 33.3%, in flight 2",
        "rank 1  ...F0 B0--- F1 B1--- ......  bubble 33.3%, in flight 1",
        "F forward, B backward, . idle; a label is kind, microbatch",
    ]


def test_labels_name_the_stage_where_the_rank_does_not() -> None:
    lines = drawn(gpipe(1, 1, virtual=2), Durations.uniform(2))
    assert lines[1].startswith("rank 0  0F0 1F0 1B0---- 0B0----   bubble 0.0%, in flight 2")
    assert lines[-1].endswith("a label is stage, kind, microbatch")


def test_split_and_overlapped_actions_are_in_the_drawing() -> None:
    schedule = from_csv("0F0,(0F1;0I0)OVERLAP_F_B,0W0,0B1", "t")
    lines = drawn(schedule, Durations.uniform(1))
    assert lines[1].split("  ")[1] == "F0 F1+I0 W0 B1---"
    assert lines[2].startswith("F forward, B backward, I backward, input, W backward, weight")


@pytest.mark.parametrize("columns", [None, 20, 37, 300])
def test_every_row_is_as_wide_as_the_makespan(columns: int | None) -> None:
    schedule = one_f_one_b(3, 5)
    lines = drawn(schedule, Durations((1, 1.7, 0.1), (2, 3.14, 0.2), send=0.05), columns)
    rows = [re.sub(r"  bubble.*", "", line) for line in lines[1:4]]
    assert len(set(map(len, rows))) == 1
    assert columns is None or len(rows[0]) == columns + len("rank 0  ")


def test_actions_without_any_time_are_drawn_too() -> None:
    lines = drawn(one_f_one_b(2, 2), Durations.uniform(2, 0, 0, send=1))
    assert "makespan 2, bubble 100.0%" in lines[0]
    assert "makespan 0" in drawn(one_f_one_b(2, 2), Durations.uniform(2, 0, 0))[0]


def test_svg_has_a_coloured_box_for_every_action() -> None:
    schedule = one_f_one_b(4, 8)
    root = picture(schedule, Durations.uniform(4))
    boxes = [box for box in root.iter(f"{SVG}rect") if box.find(f"{SVG}title") is not None]
    titles = [box.findtext(f"{SVG}title") for box in boxes]
    assert len(boxes) == 4 * 8 * 2
    assert titles[:2] == ["0F0 from 0 to 1", "0F1 from 1 to 2"]
    colours = {kind: KIND_STYLES[kind][1] for kind in (ActionKind.FORWARD, ActionKind.BACKWARD)}
    for box, title in zip(boxes, titles, strict=True):
        assert title is not None
        assert box.get("fill") == colours[ActionKind(title[1])]
    widths = {box.get("width"): box.get("fill") for box in boxes}
    assert len(widths) == 2  # a backward is twice as wide


def test_svg_says_bubble_peak_and_meaning() -> None:
    words = [
        node.text for node in picture(one_f_one_b(4, 8), Durations.uniform(4)).iter(f"{SVG}text")
    ]
    assert [f"bubble 27.3%, in flight {peak}" for peak in (4, 3, 2, 1)] == [
        word for word in words if word and word.startswith("bubble")
    ]
    assert {"F: forward", "B: backward", "idle", "rank 3"} <= set(words)
    assert "W: backward, weight" not in words


def test_overlapped_boxes_share_the_height() -> None:
    schedule = Schedule(
        "a <b>",
        2,
        (0,),
        (
            (
                Action(0, ActionKind.FORWARD, 0),
                OverlappedActions(
                    (Action(0, ActionKind.FORWARD, 1), Action(0, ActionKind.BACKWARD, 0))
                ),
                Action(0, ActionKind.BACKWARD, 1),
            ),
        ),
    )
    root = picture(schedule, Durations.uniform(1))
    boxes = [box for box in root.iter(f"{SVG}rect") if box.find(f"{SVG}title") is not None]
    assert [box.get("height") for box in boxes] == ["30.00", "15.00", "15.00", "30.00"]
    assert boxes[1].get("x") == boxes[2].get("x")
    assert "a <b>" in (root.findtext(f"{SVG}title") or "")


def test_pictures_need_nothing_from_elsewhere() -> None:
    document = draw_svg(
        build_schedule("gpipe", 2, 2),
        time_schedule(build_schedule("gpipe", 2, 2), Durations.uniform(2)),
    )
    assert document.count("http") == 1  # the name space
    assert "href" not in document
