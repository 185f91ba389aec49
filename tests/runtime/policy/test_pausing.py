"""When a run waits: by a signal over time, two limits, and a longest pause."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from holdfast.errors import DataError
from holdfast.policy.pausing import PauseLimits, Signal, begins, lasts, pause_in_force, read_signal

HOUR = 3600.0
LIMITS = PauseLimits(400.0, 300.0, 5 * HOUR)


def hours(*values: float) -> Signal:
    """A signal with a value an hour, from time 0."""
    return Signal(tuple(HOUR * row for row in range(len(values))), values)


@pytest.mark.parametrize(
    ("values", "waits"),
    [
        ((200, 500, 450, 350, 290, 500, 200), "01110 10"),
        ((500, 500, 500, 500, 500, 500, 500, 500), "11111000"),  # 5 h at most, and no other pause
        ((200, 400, 400, 200), "0000"),
        ((500, 310, 310, 290, 401), "11101"),
    ],
)
def test_hours_in_which_a_run_waits(values: tuple[float, ...], waits: str) -> None:
    signal, paused_at, found = hours(*values), None, ""
    for hour in range(len(values)):
        now = HOUR * hour
        if paused_at is None or not lasts(signal, LIMITS, now, paused_at):
            paused_at = pause_in_force(signal, LIMITS, now, paused_at)
            paused_at = now if begins(signal, LIMITS, now, paused_at) else paused_at
        found += str(int(paused_at is not None and lasts(signal, LIMITS, now, paused_at)))
    assert found == waits.replace(" ", "")


def test_a_file_with_the_value_of_now_alone_pauses_again() -> None:
    """The low value that ended a pause is in no file any more."""
    now = Signal((10 * HOUR,), (500.0,))
    assert pause_in_force(now, LIMITS, 10 * HOUR, 8 * HOUR) is None
    assert pause_in_force(now, LIMITS, 14 * HOUR, 8 * HOUR) == 8 * HOUR, "it trains as time is up"
    assert not begins(now, LIMITS, 14 * HOUR, 8 * HOUR)


def test_a_signal_that_is_not_known_pauses_nothing() -> None:
    signal = hours(500, 500)
    assert not begins(signal, LIMITS, -1.0, None)
    assert begins(signal, LIMITS, 2.9 * HOUR, None), "the last value holds for two rows"
    assert not begins(signal, LIMITS, 3.1 * HOUR, None)
    assert not lasts(signal, LIMITS, 3.1 * HOUR, 2.9 * HOUR)


def test_rows_of_a_file() -> None:
    text = "time,us,eu\n2026-01-31T15:00:00+01:00,,410\n2026-01-31 13:00:00+00:00,1,2\n"
    first = datetime(2026, 1, 31, 13, tzinfo=UTC).timestamp()
    assert read_signal(text, "f", "eu") == Signal((first, first + HOUR), (2.0, 410.0))
    assert read_signal(text, "f", "us") == Signal((first,), (1.0,))


@pytest.mark.parametrize(
    ("text", "column", "where"),
    [
        ("", "", "f:1"),
        ("time,us,eu\n", "", "f:1"),
        ("time,us\n", "eu", "f:1"),
        ("time,us\n2026-01-31T15:00:00,4\n", "", "f:2"),
        ("time,us\n2026-01-31T15:00:00+00:00,nan\n", "", "f:2"),
        ("time,us\nnoon,4\n", "", "f:2"),
        ("time,us\n", "", "f"),
    ],
)
def test_what_is_no_signal_is_refused_with_its_place(text: str, column: str, where: str) -> None:
    with pytest.raises(DataError) as refused:
        read_signal(text, "f", column)
    assert refused.value.where == where
    assert refused.value.remedy
