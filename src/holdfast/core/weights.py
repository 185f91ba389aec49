"""Weights: what the loss and the gradient of a step are divided by.

A weight counts tokens or samples, or is a fraction of them. Fractions are multiples of `UNIT`.
Ranks add up whole numbers of units, so a sum has the same bits in any order.
"""

from __future__ import annotations

from math import isfinite

UNIT = 2.0**-32


def read_weight(given: object) -> float | None:
    """A weight that a user's code gave, rounded to a multiple of `UNIT`; None if it is no number
    from 0 on. A whole number stays an int. A tensor or array of one number counts as it."""
    if callable(item := getattr(given, "item", None)) and getattr(given, "shape", None) == ():
        given = item()
    if isinstance(given, bool) or not isinstance(given, int | float):
        return None
    if not isfinite(given) or given < 0:
        return None
    return given if isinstance(given, int) else shortest(round(given / UNIT) * UNIT)


def to_units(weight: float) -> int:
    """How many units a weight has."""
    return weight << 32 if isinstance(weight, int) else round(weight / UNIT)


def from_units(units: int) -> float:
    """The inverse of `to_units`."""
    return shortest(units / 2**32)


def shortest(weight: float) -> float:
    """The same number, as an int if it has no fraction."""
    return int(weight) if float(weight).is_integer() else weight
