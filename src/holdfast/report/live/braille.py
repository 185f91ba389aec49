"""Small pictures made of characters: a curve in Braille dots, a bar."""

from __future__ import annotations

import math
from collections.abc import Sequence

# Dot bits of a Braille cell by (row, column), Unicode block U+2800.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def braille(values: Sequence[float], width: int, height: int, high: float = math.inf) -> list[str]:
    """The values as a curve, width x height characters, low values at the bottom.

    Each column of dots shows the mean of its share of the values; values that are not finite are
    left out. Values above `high` are drawn at the top.
    """
    columns, rows = width * 2, height * 4
    means = [min(v, high) for v in _bins([v for v in values if math.isfinite(v)], columns)]
    if not means:
        return [" " * width] * height
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    cells = [[0] * width for _ in range(height)]
    before: int | None = None
    for column, mean in enumerate(means):
        row = rows - 1 - round((mean - low) / span * (rows - 1))
        reach = range(row, row + 1) if before is None else _between(before, row)
        for each in reach:
            cells[each // 4][column // 2] |= _DOTS[each % 4][column % 2]
        before = row
    return ["".join(chr(0x2800 + bits) for bits in line) for line in cells]


def scale_top(values: Sequence[float]) -> float:
    """Return the top of a curve's scale, which neither the first tenth nor single peaks rule."""
    finite = [v for v in values if math.isfinite(v)]
    later = sorted(finite[len(finite) // 10 :]) or [math.nan]
    return later[max(0, math.ceil(len(later) * 0.98) - 1)]


def _between(before: int, row: int) -> range:
    """Rows that join two neighbouring dots, without the first."""
    if row > before:
        return range(before + 1, row + 1)
    return range(row, before) if row < before else range(row, row + 1)


def _bins(values: Sequence[float], most: int) -> list[float]:
    """Means of `most` equal shares; fewer values are stretched, so the curve fills the width."""
    count = len(values)
    if not count:
        return []
    out = []
    for index in range(most):
        first = index * count // most
        last = max(first + 1, (index + 1) * count // most)
        share = values[first:last]
        out.append(sum(share) / len(share))
    return out


def split_bar(ratio: float, width: int) -> tuple[str, str]:
    """(done, rest) of a line that is `ratio` full."""
    done = round(min(1.0, max(0.0, ratio)) * width)
    return "━" * done, "─" * (width - done)
