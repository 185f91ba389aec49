"""Learning-rate schedules: values at the corners, and no jumps."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.config.sections.train import ScheduleConfig, TrainConfig
from holdfast.core.lr_schedule import last_common_step, learning_rate, schedule_factor

KINDS = ("constant", "linear", "cosine", "wsd")


def test_cosine_values() -> None:
    schedule = ScheduleConfig(kind="cosine", warmup_steps=10, final_ratio=0.1)
    assert [schedule_factor(schedule, n, 110) for n in (1, 5, 10)] == [0.1, 0.5, 1.0]
    assert schedule_factor(schedule, 60, 110) == pytest.approx(0.55)
    assert schedule_factor(schedule, 35, 110) == pytest.approx(
        0.1 + 0.45 * (1 + math.cos(math.pi / 4))
    )
    assert schedule_factor(schedule, 110, 110) == pytest.approx(0.1)


def test_linear_and_constant_values() -> None:
    linear = ScheduleConfig(kind="linear", warmup_steps=0, final_ratio=0.0)
    assert [schedule_factor(linear, n, 4) for n in (1, 2, 3, 4)] == [0.75, 0.5, 0.25, 0.0]
    constant = ScheduleConfig(kind="constant", warmup_steps=2)
    assert [schedule_factor(constant, n, 9) for n in (1, 2, 3, 9)] == [0.5, 1.0, 1.0, 1.0]


def test_wsd_is_flat_and_then_falls_over_a_fifth() -> None:
    schedule = ScheduleConfig(kind="wsd", warmup_steps=5, final_ratio=0.2)
    assert [schedule_factor(schedule, n, 100) for n in (5, 6, 50, 80)] == [1.0] * 4
    assert schedule_factor(schedule, 90, 100) == pytest.approx(0.6)
    assert schedule_factor(schedule, 100, 100) == pytest.approx(0.2)
    explicit = ScheduleConfig(kind="wsd", warmup_steps=0, decay_steps=50, final_ratio=0.0)
    assert schedule_factor(explicit, 75, 100) == pytest.approx(0.5)


def test_rate_is_the_peak_times_the_factor() -> None:
    train = TrainConfig(steps=20)
    assert learning_rate(train, 20) == train.optimizer.learning_rate
    assert learning_rate(train, 1) == pytest.approx(train.optimizer.learning_rate / 20)


@given(
    st.sampled_from(KINDS),
    st.integers(1, 60),
    st.integers(0, 80),
    st.integers(0, 80),
    st.floats(0, 1),
)
def test_every_schedule_rises_once_and_then_never_rises(
    kind: str, steps: int, warmup: int, decay: int, ratio: float
) -> None:
    schedule = ScheduleConfig.model_validate(
        {"kind": kind, "warmup_steps": warmup, "decay_steps": decay, "final_ratio": ratio}
    )
    rates = [schedule_factor(schedule, n, steps) for n in range(1, steps + 1)]
    assert all(0.0 <= r <= 1.0 for r in rates)
    after = rates[max(0, warmup - 1) :]
    assert all(b <= a + 1e-12 for a, b in pairwise(after))
    if kind != "constant" and warmup < steps:
        assert rates[-1] == pytest.approx(ratio)


def test_a_schedule_with_a_length_of_its_own_leaves_the_steps_before_as_they_were() -> None:
    short = TrainConfig(steps=50)
    long = TrainConfig(steps=80, schedule=ScheduleConfig(steps=50))
    assert [learning_rate(short, s) for s in range(1, 51)] == [
        learning_rate(long, s) for s in range(1, 51)
    ]
    assert {learning_rate(long, s) for s in range(50, 81)} == {learning_rate(short, 50)}


def test_last_common_step() -> None:
    wsd = ScheduleConfig(kind="wsd", warmup_steps=5)
    short, long = TrainConfig(steps=50, schedule=wsd), TrainConfig(steps=80, schedule=wsd)
    assert last_common_step(short, long, 30) == 30
    assert last_common_step(short, long, 50) == 40, "the decay takes the last fifth"
    assert last_common_step(TrainConfig(steps=50), TrainConfig(steps=51), 50) == 20, "warm-up"
