"""Weights: what the loss and the gradient of a step are divided by.

A weight counts tokens or samples, or is a fraction of them. Fractions are multiples of `UNIT`, so
float64 adds up to 2**29 of them without rounding, and a sum has the same bits in any order.
"""

from __future__ import annotations

from math import isfinite

UNIT = 2.0**-24


def read_weight(given: object) -> float | None:
    """A weight that a user's code gave, rounded to a multiple of `UNIT`; None if it is no number
    from 0 on. A whole number stays an int."""
    if isinstance(given, bool) or not isinstance(given, int | float):
        return None
    if not isfinite(given) or given < 0:
        return None
    return given if isinstance(given, int) else shortest(round(given / UNIT) * UNIT)


def shortest(weight: float) -> float:
    """The same number, as an int if it has no fraction."""
    return int(weight) if float(weight).is_integer() else weight
