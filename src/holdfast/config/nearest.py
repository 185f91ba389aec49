"""Finds values close to one that does not work, for refusals."""

from __future__ import annotations

from collections.abc import Callable


def nearest_degrees(degree: int, works: Callable[[int], bool], most: int) -> str:
    """Return the closest degrees below and above `degree` that work, in words: "2 or 4"."""
    below = next((d for d in range(min(degree - 1, most), 0, -1) if works(d)), None)
    above = next((d for d in range(degree + 1, most + 1) if works(d)), None)
    return " or ".join(str(d) for d in (below, above) if d is not None)
