"""Weights in the bytes of a mask, and in targets."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.core.data.target_weights import (
    LARGEST,
    PER_ONE,
    add_weights,
    byte_of,
    target_ids,
    target_weights,
    total_weight,
    with_weights,
)
from holdfast.core.weights import UNIT

MASKED = -100


def test_each_hundredth_has_a_byte_of_its_own() -> None:
    weights = [number / PER_ONE for number in range(LARGEST + 1)]
    found = [byte_of(weight) for weight in weights]
    assert len(set(found)) == LARGEST + 1
    assert (found[0], found[1], found[100], found[254]) == (0, 2, 1, 255)


@pytest.mark.parametrize("weight", [-1, 0.005, 2.55, 3, 1 / 3, True, "1", None, float("nan")])
def test_what_is_no_hundredth_has_none(weight: object) -> None:
    assert byte_of(weight) is None


def test_targets_carry_their_weights_and_masked_ones_none() -> None:
    ids = np.array([7, 2**31 - 1, 0, 9, 4], dtype=np.int64)
    packed = add_weights(ids, np.array([1, 51, 255, 0, 2], dtype=np.uint8))
    assert packed[0] == 7  # counts once: its token id alone
    packed[3] = MASKED
    assert target_ids(packed).tolist() == [7, 2**31 - 1, 0, MASKED, 4]
    weights = target_weights(packed)
    assert weights.tolist() == pytest.approx([1.0, 0.5, 2.54, 0.0, 0.01])
    assert total_weight(packed) == pytest.approx(4.05, abs=UNIT)
    assert np.array_equal(with_weights(target_ids(packed), weights), packed)
    assert repr(total_weight(np.array([3, 4, MASKED]))) == "2"
