"""What `benchmarks.runtime.recovery` makes of the lines that processes write, ours and others'."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from benchmarks.runtime.own_loop_kill import lines_of
from benchmarks.runtime.recovering.lines import Found, Line, Lines

from holdfast.events import Event, GenerationStarted, Record, StepDone, WorkerStarted
from holdfast.layout import Layout, place_replicas
from tests.support.commands import apart

Told = tuple[float, int, int, int]
"""When, in seconds from now; step, generation, process."""
BEFORE: list[Told] = [(step - 4.0, step, 1, pid) for step in (1, 2, 3) for pid in (7, 8)]


@pytest.fixture
def befallen(tmp_path: Path) -> Callable[..., Found]:
    """What comes of a loss after BEFORE, when these lines follow."""

    def befall(after: Sequence[Told], still: bool = False) -> Found:
        lines, now = Lines(tmp_path / "lines", lambda: ""), time.time()

        def tell(told: Sequence[Told]) -> None:
            with (tmp_path / "lines").open("a") as file:
                for when, step, generation, pid in told:
                    file.write(f"{now + when} {step} {generation} 0 {pid} 2\n")

        def deed(here: list[Line]) -> None:
            tell(after)

        tell(BEFORE)
        return lines.befall(deed, still=still)

    return befall


def _steps(first: int, pid: int) -> list[Told]:
    return [(10.0 + step, step, 2, pid) for step in range(first, first + 3)]


def test_a_step_that_goes_on_with_what_was_kept_is_not_lost(befallen: Callable[..., Found]) -> None:
    assert befallen(_steps(4, 7)).lost == 0


def test_a_step_whose_microbatches_were_thrown_away_is_lost(befallen: Callable[..., Found]) -> None:
    """Whoever stays says so, however many of them."""
    assert befallen([(9.0, -4, 2, 7), (9.0, -4, 2, 8), *_steps(4, 7)]).lost == 1


def test_steps_that_were_committed_and_are_done_again_are_lost(
    befallen: Callable[..., Found],
) -> None:
    assert befallen([(9.0, -4, 2, 7), *_steps(3, 7)]).lost == 2


def test_where_nobody_stays_the_step_in_flight_is_lost_too(befallen: Callable[..., Found]) -> None:
    """As when torchrun starts all processes anew: they have nothing that they could tell."""
    assert befallen(_steps(2, 9)).lost == 3


def test_who_comes_back_costs_the_time_between_the_last_step_and_the_next(
    befallen: Callable[..., Found],
) -> None:
    """However long the deed was before; with a step among as many as before as the measure."""
    last = [(12.0, 4, 1, 7)]
    found = befallen([*last, (14.5, 5, 2, 7), (15.0, 6, 2, 7), (15.5, 7, 2, 7)], still=True)
    assert found.seconds == pytest.approx(2.5)
    assert found.after == pytest.approx(0.5)
    assert found.lost == 0
    assert found.beyond_before == pytest.approx(found.seconds - found.before)


# --- what `benchmarks.runtime.own_loop_kill` makes of a journal -----------------------------------
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


# --- a standby that takes over compiles nothing again, and keeps the bits -------------------------
@pytest.mark.slow
def test_a_standby_has_compiled_before_it_is_needed() -> None:
    done = apart(module="benchmarks.runtime.warm_standby", deadline=1200).succeeds()
    (row,) = [line for line in done.out.splitlines() if line.startswith("killed, standby")]
    first, standby, after = row.removeprefix("killed, standby").split()[:3]
    assert int(standby) >= int(first) > 0
    assert after == "0"
