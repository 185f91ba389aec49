"""Schedules on waiting devices: the executed timeline against the timer's, and what it shows."""

from __future__ import annotations

import pytest
from benchmarks.runtime.bubble import (
    SPLIT_V,
    PipelineMeasurement,
    execute,
    in_order,
    measure_pipeline,
)
from benchmarks.runtime.waiting_stages import WaitingStages

from holdfast.core.schedule.csv import from_csv
from holdfast.core.schedule.named import build_schedule
from holdfast.core.schedule.table import ActionKind, Schedule
from holdfast.core.schedule.timing import Durations, Timeline, time_schedule
from holdfast.parallel.comm.trace import COMPUTE, RECEIVE, SpanRecorder

TOLERANCE = 0.10  # of the makespan, and of every rank's bubble
ATTEMPTS = 10


def distance(found: PipelineMeasurement, planned: Timeline) -> float:
    """The largest difference, as a share: of the makespan, and of each rank's bubble."""
    bubbles = zip(found.bubble, planned.bubble, strict=True)
    return max(abs(found.makespan_s / planned.makespan - 1), *(abs(f - p) / p for f, p in bubbles))


def best(schedule: Schedule, durations: Durations) -> PipelineMeasurement:
    """Execute until the timeline is within the tolerance, at most ATTEMPTS times; the closest.

    A wait is never shorter than it should be, so whatever disturbs a run makes it longer; on a
    machine that others load too, the least disturbed run is what the schedule does.
    """
    planned = time_schedule(schedule, durations)
    found: list[PipelineMeasurement] = []
    for _ in range(ATTEMPTS):
        spans = execute(schedule, durations)
        assert in_order(schedule, spans)  # however long it took
        found.append(measure_pipeline(spans))
        if distance(found[-1], planned) <= TOLERANCE:
            break
    return min(found, key=lambda one: distance(one, planned))


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved", "zb-h1", "zbv", "dualpipev"])
@pytest.mark.slow
def test_bubble_pp4(name: str) -> None:
    ranks, microbatches = 4, 8
    schedule = build_schedule(name, ranks, microbatches, 2 if name == "interleaved" else 1)
    each = schedule.stages // ranks
    durations = Durations.uniform(schedule.stages, 0.08 / each, 0.16 / each)
    found, planned = best(schedule, durations), time_schedule(schedule, durations)
    assert distance(found, planned) <= TOLERANCE, (found, planned.makespan, planned.bubble)
    if name in ("1f1b", "gpipe"):
        formula = (ranks - 1) / (microbatches + ranks - 1)
        assert found.bubble == pytest.approx([formula] * ranks, rel=TOLERANCE)


@pytest.mark.slow
def test_bubble_pp4_uneven_stages() -> None:
    """The slowest stage waits least; every rank's share is the timer's."""
    schedule = build_schedule("1f1b", 4, 8)
    durations = Durations((0.03, 0.06, 0.04, 0.05), (0.06, 0.12, 0.08, 0.10))
    found, planned = best(schedule, durations), time_schedule(schedule, durations)
    assert distance(found, planned) <= TOLERANCE, (found, planned.makespan, planned.bubble)
    assert found.bubble.index(min(found.bubble)) == 1


@pytest.mark.slow
def test_bubble_split_backward_on_virtual_stages() -> None:
    """Its bubble is a thirteenth, so that a tenth of it would be two milliseconds a rank."""
    schedule, durations = from_csv(SPLIT_V, "v"), Durations.uniform(4, 0.04, 0.08)
    found, planned = best(schedule, durations), time_schedule(schedule, durations)
    assert found.makespan_s == pytest.approx(planned.makespan, rel=TOLERANCE)
    assert found.bubble == pytest.approx(planned.bubble, abs=0.03)


@pytest.mark.slow
def test_an_asynchronous_schedule_has_no_bubble() -> None:
    """The last of three steps, with a vote of all ranks before each."""
    schedule, durations = build_schedule("pipedream", 4, 8), Durations.uniform(4, 0.04, 0.08)
    planned = time_schedule(schedule, durations)
    assert max(planned.bubble) < 1e-9
    for _ in range(ATTEMPTS):
        spans = execute(schedule, durations)
        assert in_order(schedule, spans)
        found = measure_pipeline(spans)
        if max(found.bubble) < 0.03 and found.makespan_s < 1.1 * planned.makespan:
            return
    pytest.fail(f"it waited: {found}")


def test_waiting_for_a_peer_is_seen() -> None:
    """The last stage's spans say that it waited for the first forward of the three before it, where
    it was not itself kept from beginning until that was over."""
    for _ in range(ATTEMPTS):
        spans = execute(build_schedule("gpipe", 4, 2), Durations.uniform(4, 0.04, 0.04))
        (waited,) = (s for s in spans[3] if s.track == RECEIVE and s.name == "3F0")
        (before,) = (s for s in spans[2] if s.track == COMPUTE and s.name == "2F0")
        assert waited.stop > before.stop
        assert not [s for s in spans[0] if s.track == RECEIVE and s.name.startswith("0F")]
        if waited.start < before.start:
            return
    pytest.fail("it was never there in time")


def test_kinds_of_a_stage_wait_as_long_as_they_should() -> None:
    """A row without pauses ends on time: each wait counts from the planned end of the last."""
    seconds = {(0, ActionKind.FORWARD): 0.02, (0, ActionKind.BACKWARD): 0.05}
    work, recorder = WaitingStages(2, seconds, 16), SpanRecorder()
    for _ in range(10):
        with recorder.span(COMPUTE, "F"):
            out = work.forward(0, 0, None)
        with recorder.span(COMPUTE, "B"):
            assert work.backward(0, 0, out) is None
    assert out is not None
    assert (tuple(out.shape), out.dtype) == work.boundary(1, 0)
    assert recorder.spans[-1].stop - recorder.spans[0].start >= 10 * 0.07 - 1e-3
    forwards = sorted(s.seconds for s in recorder.spans if s.name == "F")
    assert forwards[len(forwards) // 2] < 0.035  # neither kind takes the other's time
