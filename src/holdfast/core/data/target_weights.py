"""Weights of targets: a dataset's mask has one byte for each token, and a target carries its own.

    byte 0       the token carries no loss
    byte 1       it counts once
    byte b > 1   it counts (b - 1) hundredths

A target is a token id. If it does not count once, its hundredths are in the bits from `SHIFT` on.
So what moves, hashes or cuts targets has the weights too. A target that counts once is its token
id alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from holdfast.core.weights import read_weight

PER_ONE, LARGEST = 100, 254  # hundredths
SHIFT = 32
ID_BITS = (1 << SHIFT) - 1


def byte_of(weight: object) -> int | None:
    """The byte of a weight; None if it is no hundredth from 0 to 2.54."""
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        return None
    if weight in (0, 1):
        return int(weight)
    if not 0 < weight <= LARGEST / PER_ONE:
        return None
    hundredths = round(weight * PER_ONE)
    is_exact = abs(hundredths / PER_ONE - weight) < 1e-9
    return hundredths + 1 if is_exact and hundredths else None


def add_weights(targets: NDArray[np.int64], mask: NDArray[np.uint8]) -> NDArray[np.int64]:
    """targets, mask: [n], the bytes of the targets -> the targets with their weights: [n]"""
    hundredths = np.where(mask > 1, mask.astype(np.int64) - 1, 0)
    return targets | hundredths << SHIFT


def target_ids(targets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Token ids alone; what is below 0 stays."""
    return np.where(targets < 0, targets, targets & ID_BITS)


def target_weights(targets: NDArray[np.int64]) -> NDArray[np.float32]:
    """What each target counts; 0 for those below 0."""
    hundredths = targets >> SHIFT
    weights = np.where(hundredths > 0, hundredths / PER_ONE, 1.0)
    return np.where(targets < 0, 0.0, weights).astype(np.float32)


def total_weight(targets: NDArray[np.int64]) -> float:
    """The sum of the weights, as `core.weights` counts."""
    counted = targets[targets >= 0]
    hundredths = counted >> SHIFT
    ones = int(np.count_nonzero(hundredths == 0))
    total = read_weight(ones + int(hundredths.sum()) / PER_ONE)
    assert total is not None, "it is a number from 0 on"
    return total


def with_weights(ids: NDArray[np.int64], weights: NDArray[np.float32]) -> NDArray[np.int64]:
    """The inverse of `target_ids` and `target_weights`."""
    hundredths = np.rint(weights.astype(np.float64) * PER_ONE).astype(np.int64)
    return np.where((ids < 0) | (hundredths == PER_ONE), ids, ids | hundredths << SHIFT)
