"""What became of a save, where it is made a second time by other means."""

from __future__ import annotations

import time

from holdfast.checkpoint.outcomes import Outcomes
from holdfast.events import CheckpointCommitted, CheckpointFailed

SAVE = (1, 20)


def test_who_waits_for_a_save_that_is_made_again_hears_of_the_second_end() -> None:
    outcomes = Outcomes(time.monotonic)
    outcomes.captured(SAVE)
    outcomes.fail(SAVE, "generation 2 has begun")
    outcomes.again(SAVE)
    assert outcomes.settle(SAVE, 0.0) == (False, None)
    outcomes.fail(SAVE, "the first attempt, late")
    assert outcomes.settle(SAVE, 0.0) == (False, None)
    outcomes.succeed(SAVE, "commits/key", 1)
    assert outcomes.settle(SAVE, 0.0) == (True, None)
    kinds = [kind for kind, _ in outcomes.since(0, 0.0)[0]]
    assert kinds == [CheckpointFailed.kind, CheckpointCommitted.kind]


def test_a_second_attempt_that_fails_is_an_end_too() -> None:
    outcomes = Outcomes(time.monotonic)
    outcomes.again(SAVE)
    outcomes.gave_up(SAVE, "the disk is full")
    assert outcomes.settle(SAVE, 0.0) == (True, "the disk is full")
