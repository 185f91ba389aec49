"""What `benchmarks.runtime.recovery` makes of the lines that processes write, ours and others'."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from benchmarks.runtime.recovering.lines import Found, Line, Lines

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
