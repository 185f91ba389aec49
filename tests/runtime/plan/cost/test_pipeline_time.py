"""Seconds of pipelines: the planner's fast execution against the table's own timing, and long
steps against complete tables."""

from __future__ import annotations

import random
import time

import pytest

from holdfast.core.schedule.named import build_schedule
from holdfast.core.schedule.table import ActionKind
from holdfast.core.schedule.timing import Durations, max_in_flight, time_schedule
from holdfast.plan.cost import long_pipeline
from holdfast.plan.cost.compiled_schedule import compile_schedule, compiled
from holdfast.plan.cost.long_pipeline import Pipeline, Times, makespan
from holdfast.plan.cost.pipeline_time import StageTimes, in_flight, pipeline_time

SCHEDULES = [
    ("1f1b", 1),
    ("gpipe", 1),
    ("gpipe", 2),
    ("interleaved", 2),
    ("interleaved", 3),
    ("zb-h1", 1),
    ("zbv", 2),
    ("dualpipev", 2),
]


def random_stages(
    rng: random.Random, number: int, send: float, waits: bool = False
) -> list[StageTimes]:
    """Unlike stages, some all but equal."""
    spread = rng.choice([1.0, 0.01])
    return [
        StageTimes(
            1 + spread * rng.random(),
            1 + spread * rng.random(),
            1 + spread * rng.random(),
            0.0,
            send * rng.random(),
            {},
            waits,
        )
        for _ in range(number)
    ]


def times_of(stages: list[StageTimes], is_blocking: bool) -> Times:
    works = {}
    for number, stage in enumerate(stages):
        works[number, ActionKind.FORWARD] = stage.forward
        works[number, ActionKind.BACKWARD] = stage.backward
        works[number, ActionKind.BACKWARD_INPUT] = stage.inputs
        works[number, ActionKind.BACKWARD_WEIGHT] = stage.weights
    return Times(
        works, [0.0] + [s for stage in stages for s in (stage.send, stage.send)], is_blocking
    )


@pytest.mark.parametrize(("schedule", "virtual"), SCHEDULES)
def test_without_transfers_it_is_the_tables_own_timing(schedule: str, virtual: int) -> None:
    rng = random.Random(schedule)
    for _ in range(6):
        pp, microbatches = rng.randint(2, 6), rng.randint(12, 24)
        stages = random_stages(rng, pp * virtual, 0.0)
        table = build_schedule(schedule, pp, microbatches, virtual)
        durations = Durations(
            tuple(stage.forward for stage in stages),
            tuple(stage.backward for stage in stages),
            tuple(stage.inputs for stage in stages),
            tuple(stage.weights for stage in stages),
        )
        program = compile_schedule(table)
        found = times_of(stages, False).run(program)
        assert found.makespan == pytest.approx(time_schedule(table, durations).makespan, rel=1e-12)
        assert program.in_flight == max_in_flight(table)


@pytest.mark.parametrize("is_blocking", [False, True])
@pytest.mark.parametrize(("schedule", "virtual"), SCHEDULES)
def test_a_long_step_takes_what_its_complete_table_takes(
    schedule: str, virtual: int, is_blocking: bool
) -> None:
    rng = random.Random(f"{schedule} {virtual}")
    for _ in range(5):
        pp, microbatches = rng.randint(2, 6), rng.randint(50, 120)
        times = times_of(random_stages(rng, pp * virtual, rng.choice([0.0, 0.5, 2.0])), is_blocking)
        complete = times.run(compiled(schedule, pp, microbatches, virtual)).makespan
        short = makespan(Pipeline(schedule, pp, microbatches, virtual), times)
        assert short == pytest.approx(complete, rel=1e-9)


def test_equal_stages_are_not_executed_to_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    executed = []
    run = long_pipeline.run_entries

    def counted(program, *durations):  # type: ignore[no-untyped-def]
        executed.append(len(program.entries))
        return run(program, *durations)

    monkeypatch.setattr(long_pipeline, "run_entries", counted)
    stages = [StageTimes(1.0, 1.0, 1.0, 0.0, 0.1, {})] * 8
    found = pipeline_time("1f1b", 8, 1, 4096, stages)
    assert found.seconds == pytest.approx(4096 * 3.2, rel=0.01)
    assert sum(executed) < 0.05 * 2 * 8 * 4096


def test_formulas_of_the_literature() -> None:
    """Bubbles of planning's table: 1F1B, interleaved, ZB-H1, with equal parts."""
    p, m = 4, 32

    def seconds(schedule: str, virtual: int) -> float:
        stages = [StageTimes(*(1 / virtual,) * 3, 0.0, 0.0, {})] * (p * virtual)
        return pipeline_time(schedule, p, virtual, m, stages).seconds

    assert seconds("1f1b", 1) == pytest.approx(3 * (m + p - 1))
    assert seconds("gpipe", 1) == pytest.approx(3 * (m + p - 1))
    assert seconds("interleaved", 2) == pytest.approx(3 * m + 3 * (p - 1) / 2)
    assert seconds("zb-h1", 1) == pytest.approx(3 * m + (p - 1))


def pace(stages: list[StageTimes]) -> float:
    """Seconds that one more microbatch costs."""
    one, more = (pipeline_time("1f1b", 4, 1, m, stages).seconds for m in (100, 101))
    return more - one


def test_the_slowest_stage_sets_the_pace() -> None:
    stages = [StageTimes(1.0, 1.0, 1.0, 0.0, 0.0, {}) for _ in range(4)]
    stages[1] = StageTimes(2.0, 2.0, 2.0, 0.0, 0.0, {})
    assert pace(stages) == pytest.approx(6)


def test_a_slow_rank_is_a_slow_stage() -> None:
    stages = [StageTimes(1.0, 1.0, 1.0, 0.0, 0.0, {}) for _ in range(4)]
    stages[2] = stages[2].slowed(1.5)
    assert pace(stages) == pytest.approx(4.5)


def test_what_transfers_cost_each_microbatch() -> None:
    """Neighbours in 1F1B hand one microbatch to and fro, so they wait for both transfers even
    while these are hidden. If the transfers block, an inner rank also has those of its other
    neighbour."""
    hidden, blocking = (
        [StageTimes(1.0, 1.0, 1.0, 0.0, 0.1, {}, waits) for _ in range(4)]
        for waits in (False, True)
    )
    assert pace(hidden) == pytest.approx(3.2)
    assert pace(blocking) == pytest.approx(3.4)


def test_a_slow_link_is_occupied_by_one_transfer_at_a_time() -> None:
    """Only one of three boundaries is slow: it alone sets the pace."""
    stages = [StageTimes(1.0, 1.0, 1.0, 0.0, 0.0, {}) for _ in range(4)]
    stages[1] = StageTimes(1.0, 1.0, 1.0, 0.0, 5.0, {})
    assert pipeline_time("gpipe", 4, 1, 200, stages).seconds == pytest.approx(2 * 200 * 5, rel=0.02)


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize(("schedule", "virtual"), SCHEDULES)
def test_parts_add_up(schedule: str, virtual: int, waits: bool) -> None:
    stages = random_stages(random.Random(1), 4 * virtual, 0.5, waits)
    found = pipeline_time(schedule, 4, virtual, 24, stages)
    assert sum(found.parts.values()) == pytest.approx(found.seconds)


def test_gpipe_keeps_all_microbatches() -> None:
    assert in_flight("gpipe", 4, 1, 64) == (64,) * 4
    assert in_flight("1f1b", 4, 1, 64) == (4, 3, 2, 1)


def test_a_pipeline_of_16_with_64_microbatches_is_timed_in_3_ms() -> None:
    stages = random_stages(random.Random(2), 16, 0.1)
    best = float("inf")
    for _ in range(7):
        start = time.perf_counter()
        pipeline_time("1f1b", 16, 1, 64, stages)
        best = min(best, time.perf_counter() - start)
    assert best < 3e-3
