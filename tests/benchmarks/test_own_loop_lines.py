"""What `benchmarks.runtime.own_loop_kill` makes of a journal: the steps, and the process of each
rank."""

from __future__ import annotations

from benchmarks.runtime.own_loop_kill import lines_of
from benchmarks.runtime.recovering.lines import Line

from holdfast.events import Event, GenerationStarted, Record, StepDone, WorkerStarted
from holdfast.layout import Layout, place_replicas


def _started(workers: int, came_from: list[int | None] | None) -> GenerationStarted:
    topology = place_replicas([Layout()] * workers, 1, ("a",) * workers).to_json()
    return GenerationStarted(topology, "start", step=0, came_from=came_from)


def test_a_survivor_keeps_its_process_under_another_rank() -> None:
    events: list[tuple[int, Event]] = [
        (1, _started(2, None)),
        (1, WorkerStarted(0, 70, "a", step=0)),
        (1, WorkerStarted(1, 71, "a", step=0)),
        (1, StepDone(0.5, 8, 1.0, 0.1, 0.2, step=1)),
        (2, _started(1, [1])),
        (2, StepDone(0.5, 8, 1.0, 0.1, 0.2, step=2)),
        (3, _started(2, [0, None])),
        (3, WorkerStarted(1, 72, "a", step=2)),
        (3, StepDone(0.5, 8, 1.0, 0.1, 0.2, step=3)),
    ]
    records = [Record(g, "agent", i, float(i), event) for i, (g, event) in enumerate(events)]
    assert lines_of(records) == [
        Line(3.0, 1, 1, 0, 70, 2),
        Line(3.0, 1, 1, 1, 71, 2),
        Line(5.0, 2, 2, 0, 71, 1),
        Line(8.0, 3, 3, 0, 71, 2),
        Line(8.0, 3, 3, 1, 72, 2),
    ]
