"""What counts as a jump of the loss."""

from __future__ import annotations

import math
import random

import pytest

from holdfast.policy.detection.loss_spikes import LossJumpLimits, find_loss_jump


def falling(steps: int, seed: int = 1) -> list[float]:
    noise = random.Random(seed)
    return [1 + 4 * math.exp(-step / 100) + noise.gauss(0, 0.05) for step in range(steps)]


def test_a_quiet_run_has_no_jump() -> None:
    for seed in range(5):
        losses = falling(600, seed)
        for step in range(600):
            assert find_loss_jump(losses[max(0, step - 32) : step], [losses[step]], 1) is None, step


def test_a_loss_that_drifts_up_is_no_jump() -> None:
    losses = [1 + 0.01 * step for step in range(200)]
    for step in range(200):
        assert find_loss_jump(losses[max(0, step - 32) : step], [losses[step]], 1) is None


def test_the_microbatches_that_stand_out_are_named() -> None:
    before = falling(40)[-32:]
    found = find_loss_jump(before, [10 * 4.0, 10 * 3.7, 10 * 12.0, 10 * 3.8], 40)
    assert found is not None
    assert found.microbatches == (2,)
    assert found.loss == pytest.approx(5.875)
    assert found.threshold < found.loss


def test_where_all_have_risen_all_are_named() -> None:
    found = find_loss_jump(falling(40)[-32:], [60.0] * 4, 40)
    assert found is not None
    assert found.microbatches == (0, 1, 2, 3)


def test_a_microbatch_that_is_left_out_has_no_part_in_the_mean_of_the_others() -> None:
    before = falling(40)[-32:]
    assert find_loss_jump(before, [10 * 3.9, 10 * 3.8, 0.0, 10 * 3.9], 30) is None


def test_too_few_steps_say_nothing() -> None:
    least = LossJumpLimits().min_steps
    before = falling(40)
    assert find_loss_jump(before[: least - 1], [99.0], 1) is None
    assert find_loss_jump(before[:least], [99.0], 1) is not None
