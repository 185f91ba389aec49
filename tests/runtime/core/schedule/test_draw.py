"""Drawings of schedules: what stands where, and that the SVG is one document by itself."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from holdfast.core.schedule.csv import from_csv
from holdfast.core.schedule.draw import KIND_STYLES, draw_svg, draw_text
from holdfast.core.schedule.named import build_schedule
from holdfast.core.schedule.table import (
    Action,
    ActionKind,
    OverlappedActions,
    Schedule,
    gpipe,
    one_f_one_b,
)
from holdfast.core.schedule.timing import Durations, time_schedule

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
