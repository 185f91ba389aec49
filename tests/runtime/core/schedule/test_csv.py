"""Tables as CSV, against torch's own parser, writer and schedules."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as theirs
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

from holdfast.core.schedule.check import check_schedule
from holdfast.core.schedule.csv import from_csv, to_csv
from holdfast.core.schedule.named import SCHEDULES, build_schedule
from holdfast.core.schedule.table import (
    Action,
    ActionKind,
    OverlappedActions,
    Schedule,
    ScheduleError,
)
from holdfast.core.schedule.timing import Durations, max_in_flight, time_schedule
from tests.support.schedules import random_table

FSDP = (theirs.UNSHARD, theirs.RESHARD, theirs.REDUCE_GRAD)


def stage(index: int, ranks: int, stages: int) -> Any:
    """What torch's schedules ask of a stage to lay out their table: its numbers alone."""
    return SimpleNamespace(
        stage_index=index,
        num_stages=stages,
        group_size=ranks,
        group_rank=index % ranks,
        is_first=index == 0,
        is_last=index == stages - 1,
        submod=torch.nn.Identity(),
        has_backward=True,
        stage_index_to_group_rank={},
    )


def of_torch(action: Any) -> str:
    """Their action, spelt by us."""
    if action.sub_actions is not None:
        return str(OverlappedActions(tuple(map(ours, action.sub_actions))))
    return str(ours(action))


def ours(action: Any) -> Action:
    kind = ActionKind(action.computation_type.value)
    return Action(action.stage_index, kind, action.microbatch_index)


def written_by_torch(order: dict[int, list[_Action | None]]) -> str:
    """As `_dump_csv` writes it."""
    out = io.StringIO()
    writer = csv.writer(out)
    for rank in order:
        writer.writerow(order[rank])
    return out.getvalue()


def their_runtime(schedule: Schedule) -> Any:
    local = [stage(s, schedule.ranks, schedule.stages) for s in schedule.stages_of(0)]
    runtime: Any = _PipelineScheduleRuntime
    return runtime(local, schedule.microbatches)


TABLES = [
    build_schedule("1f1b", 1, 1),
    build_schedule("1f1b", 4, 8),
    build_schedule("gpipe", 3, 2),
    build_schedule("gpipe", 2, 3, virtual=2),
    random_table(Random(3), 5, 3, 4),
]


@pytest.mark.parametrize("schedule", TABLES, ids=lambda s: f"{s.name}-{s.stages}on{s.ranks}")
def test_torch_loads_what_we_write(schedule: Schedule, tmp_path: Path) -> None:
    """Into its runtime, which also derives its transfers from it and finds no deadlock."""
    file = tmp_path / "schedule.csv"
    file.write_text(to_csv(schedule))
    runtime = their_runtime(schedule)
    runtime._load_csv(str(file))
    assert [list(map(of_torch, row)) for row in runtime.pipeline_order.values()] == [
        list(map(str, row)) for row in schedule.actions
    ]
    assert runtime.stage_index_to_group_rank == dict(enumerate(schedule.rank_of))
    order = {
        rank: [a for a in row if a.computation_type not in FSDP]
        for rank, row in runtime.pipeline_order_with_comms.items()
    }
    simulated = theirs._simulate_comms_compute(order, schedule.rank_of.__getitem__, schedule.stages)
    assert [len([a for a in simulated[r] if a]) for r in order] == [len(order[r]) for r in order]


@pytest.mark.parametrize("schedule", TABLES, ids=lambda s: f"{s.name}-{s.stages}on{s.ranks}")
@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
def test_we_read_what_torch_writes(schedule: Schedule, form: Any, tmp_path: Path) -> None:
    """Its transfers and other cells that follow from the table are left out."""
    file = tmp_path / "schedule.csv"
    file.write_text(to_csv(schedule))
    runtime = their_runtime(schedule)
    runtime._load_csv(str(file))
    back = tmp_path / "back.csv"
    runtime._dump_csv(str(back), form)
    if form == "compute_comms" and schedule.ranks > 1:
        assert "SEND_F" in back.read_text()
    assert from_csv(back.read_text(), schedule.name) == schedule


THEIRS = [
    (theirs.ScheduleGPipe, 4, 1, 8),
    (theirs.ScheduleGPipe, 2, 1, 3),
    (theirs.ScheduleLoopedBFS, 2, 3, 4),
    (theirs.ScheduleLoopedBFS, 4, 2, 8),
    (theirs.ScheduleInterleaved1F1B, 4, 2, 8),
    (theirs.ScheduleInterleaved1F1B, 2, 3, 4),
    (theirs.ScheduleInterleavedZeroBubble, 4, 2, 8),
    (theirs.ScheduleInterleavedZeroBubble, 2, 2, 4),
    (theirs.ScheduleZBVZeroBubble, 4, 2, 8),
    (theirs.ScheduleZBVZeroBubble, 2, 2, 6),
    (theirs.ScheduleDualPipeV, 4, 2, 8),
    (theirs.ScheduleDualPipeV, 2, 2, 10),
]


def their_table(kind: Any, ranks: int, virtual: int, microbatches: int) -> str:
    stages = [stage(s * ranks, ranks, ranks * virtual) for s in range(virtual)]
    single = issubclass(kind, theirs.PipelineScheduleSingle)
    made = kind(stages[0] if single else stages, microbatches, loss_fn=lambda *_: None)
    return written_by_torch(made.pipeline_order)


@pytest.mark.parametrize(
    ("kind", "ranks", "virtual", "microbatches"),
    THEIRS,
    ids=[f"{k.__name__}-{r}x{v}-{m}" for k, r, v, m in THEIRS],
)
def test_their_schedules_are_tables_of_ours(
    kind: Any, ranks: int, virtual: int, microbatches: int
) -> None:
    """Interleaved, with split backward, and bidirectional ones: read, proved, timed, written."""
    text = their_table(kind, ranks, virtual, microbatches)
    schedule = from_csv(text, kind.__name__)
    check_schedule(schedule)
    assert (schedule.ranks, schedule.stages) == (ranks, ranks * virtual)
    assert schedule.microbatches == microbatches
    parsed = [
        [
            of_torch(a)
            for cell in row
            if (a := _Action.from_str(cell)) is not None and "REDUCE_GRAD" not in cell
        ]
        for row in csv.reader(io.StringIO(text))
    ]
    assert [list(map(str, row)) for row in schedule.actions] == parsed
    assert from_csv(to_csv(schedule), schedule.name) == schedule
    found = time_schedule(schedule, Durations.uniform(schedule.stages))
    work = 3 * microbatches * virtual
    assert found.makespan >= work
    assert min(found.bubble) == pytest.approx(1 - work / found.makespan, abs=1e-12)


def test_gpipe_is_in_their_order() -> None:
    assert from_csv(their_table(theirs.ScheduleGPipe, 4, 1, 8), "gpipe") == build_schedule(
        "gpipe", 4, 8
    )


def test_1f1b_is_in_their_order() -> None:
    """All ranks but the last. There torch 2.13 prints forwards from 1 on, to one too many: its
    1F1B executes from code, not from this table, and our checker refuses the table."""
    printed = from_csv(their_table(theirs.Schedule1F1B, 4, 1, 8), "1f1b")
    assert printed.actions[:3] == build_schedule("1f1b", 4, 8).actions[:3]
    last = [(cell.kind, cell.microbatch) for cell in printed.actions[3] if isinstance(cell, Action)]
    if last[0][1] == 0:
        assert printed == build_schedule("1f1b", 4, 8)
    else:
        with pytest.raises(ScheduleError, match="is missing"):
            check_schedule(printed)


def test_v_schedules_keep_both_ends_on_one_rank() -> None:
    """The bidirectional form: rank r holds stages r and 2p - 1 - r, and overlaps the two."""
    schedule = from_csv(their_table(theirs.ScheduleDualPipeV, 4, 2, 10), "dualpipev")
    assert schedule.rank_of == (0, 1, 2, 3, 3, 2, 1, 0)
    assert any(isinstance(cell, OverlappedActions) for row in schedule.actions for cell in row)
    assert max(max_in_flight(schedule)) <= 2 * schedule.ranks + 1


def test_zero_bubble_tables_are_timed_as_shorter() -> None:
    """With F = I = W the split backward of ZBV leaves less idle time than 1F1B's (arXiv
    2401.10241, table 1), by our timer on torch's own table."""
    zbv = from_csv(their_table(theirs.ScheduleZBVZeroBubble, 4, 2, 8), "zbv")
    plain = time_schedule(build_schedule("1f1b", 4, 8), Durations.uniform(4, 2, 4))
    found = time_schedule(zbv, Durations.uniform(8, 1, 2))
    assert max(found.bubble) < min(plain.bubble)


@settings(max_examples=100, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 3), st.integers(0, 2), st.integers(1, 4))
def test_written_and_read_back(random: Random, ranks: int, more: int, microbatches: int) -> None:
    schedule = random_table(random, ranks + more, ranks, microbatches)
    assert from_csv(to_csv(schedule), "random") == schedule
    assert from_csv(to_csv(schedule), "random", schedule.rank_of) == schedule


def test_empty_cells_are_moments_without_work() -> None:
    assert from_csv("0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n\n", "gpipe").actions == (
        build_schedule("gpipe", 2, 2).actions[0],
        build_schedule("1f1b", 2, 2).actions[1],
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_form_is_plain(name: str) -> None:
    first = to_csv(build_schedule(name, 2, 2)).split("\n")[0]
    assert (
        first
        == {
            "gpipe": "0F0,0F1,0B0,0B1",
            "1f1b": "0F0,0F1,0B0,0B1",
            "interleaved": "0F0,0F1,0B0,0B1",
            "zb-h1": "0F0,0F1,0I0,0W0,0I1,0W1",
            "zbv": "0F0,0F1,3F0,3I0,3W0,3F1,3I1,3W1,0I0,0W0,0I1,0W1",
            "pipedream": "0B0,0F2,0B1,0F3",
            "pipedream-2bw": "0B0,0F2,0B1,0F3",
            "pipemare": "0B0,0F2,0B1,0F3",
            "dualpipev": "0F0,0F1,3F0,3I0,3W0,3F1,3B1,0B0,0B1",
            "forward": "0F0,0F1",
        }[name]
    )


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (["0F0", "1F0,1X0"], "t.csv, row 2, column 2: '1X0' is no action; write stage, one of"),
        (["0F0,hello"], "t.csv, row 1, column 2: 'hello' is no action"),
        (["0F"], "t.csv, row 1, column 1: '0F' is no action"),
        (["-1F0"], "t.csv, row 1, column 1: '-1F0' is no action"),
        (["0F0,(0F1;)OVERLAP_F_B"], "row 1, column 2: '' is no action"),
        ([""], "t.csv: the table has no action; write 0F0"),
        (["0F0,2F0"], "t.csv: stage 1 has no action"),
    ],
)
def test_what_is_no_table(rows: Sequence[str], sentence: str) -> None:
    with pytest.raises(ScheduleError) as refused:
        from_csv("\n".join(rows), "t.csv")
    assert sentence in str(refused.value)
