"""What a worker's slowdown came from: measured waiting, larger data, or neither."""

from __future__ import annotations

import pytest

from holdfast.policy.detection.stragglers import SlowdownParts, StepTiming, StragglerDetector


def parts_of(seconds: float, waited: float, elements: float) -> SlowdownParts:
    """Of worker 3, next to three workers that take 1 s, of which 0.25 s without a processor, for
    100 elements."""
    detector = StragglerDetector()
    for _ in range(100):
        usual = [StepTiming(who, "same", 2.0, 2, 0.5, 200.0) for who in range(3)]
        slow = StepTiming(3, "same", 2 * seconds, 2, 2 * waited, 2 * elements)
        if changes := detector.observe([*usual, slow]):
            (change,) = changes
            assert change.worker == 3
            return change.parts
    raise AssertionError("no worker was found to be slow")


@pytest.mark.parametrize(
    ("seconds", "waited", "elements", "parts"),
    [
        (5.0, 0.25, 100.0, SlowdownParts(0.0, 1.0)),
        (5.0, 3.25, 100.0, SlowdownParts(0.75, 1.0)),
        (5.0, 0.25, 450.0, SlowdownParts(0.0, 4.5)),
        (5.0, 9.0, 100.0, SlowdownParts(1.0, 1.0)),
        (5.0, 0.0, 0.0, SlowdownParts(0.0, 0.0)),
    ],
)
def test_parts_of_a_slowdown(
    seconds: float, waited: float, elements: float, parts: SlowdownParts
) -> None:
    assert parts_of(seconds, waited, elements) == parts
