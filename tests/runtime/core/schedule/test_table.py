"""The tables of the named schedules, against their definition; what they refuse."""

from __future__ import annotations

import pytest

from holdfast.core.schedule.check import check_schedule
from holdfast.core.schedule.named import SCHEDULES, build_schedule
from holdfast.core.schedule.table import forward_only, gpipe, one_f_one_b
from holdfast.errors import LayoutError

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
    ("name", "ranks", "microbatches", "virtual", "sentence"),
    [
        (
            "1f1b",
            4,
            3,
            1,
            "layout.schedule: the schedule 1f1b over 4 ranks needs at least 4 "
            "microbatches, there are 3; use 4 or more microbatches a replica, fewer stages, or the "
            "schedule gpipe",
        ),
        (
            "gpipe",
            2,
            0,
            1,
            "layout.schedule: the schedule gpipe over 2 ranks needs at least 1 "
            "microbatches, there are 0; use 1 or more microbatches a replica",
        ),
        (
            "1f1b",
            2,
            4,
            2,
            "layout.schedule: the schedule 1f1b has one stage a rank, not 2; use "
            "the schedule interleaved or gpipe, or one stage a rank",
        ),
        ("1f1p", 2, 4, 1, "layout.schedule: there is no schedule '1f1p'; use 1f1b"),
        (
            "zigzag",
            2,
            4,
            1,
            "layout.schedule: there is no schedule 'zigzag'; use one of 1f1b, gpipe, interleaved, "
            "zb-h1, zbv, dualpipev, pipedream, pipedream-2bw, pipemare, forward",
        ),
        (
            "gpipe",
            0,
            4,
            1,
            "layout.schedule: 0 ranks with 1 stages each are no pipeline; use 1 or more of both",
        ),
    ],
)
def test_what_cannot_be_is_one_sentence(
    name: str, ranks: int, microbatches: int, virtual: int, sentence: str
) -> None:
    with pytest.raises(LayoutError) as refused:
        build_schedule(name, ranks, microbatches, virtual)
    assert str(refused.value) == sentence
