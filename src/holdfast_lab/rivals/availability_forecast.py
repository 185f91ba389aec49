"""Parcae's forecast of the number of nodes: ARIMA(1, 1, 0) with the rules of its code. Pure.

Source: JF-D/Parcae, liveput/trace_prediction.py and trace.py (commit 7cb3059); Duan et al., NSDI
2024, section 5. The autoregression is fitted by least squares on the differences of the window,
where the original calls a library's maximum likelihood.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from statistics import fmean, pstdev, pvariance

PAST = {14: 17, 12: 12, 10: 10, 9: 9, 8: 8, 7: 8, 5: 10}
"""Minutes that a forecast of so many minutes looks back."""
_GROWTH = 3
"""A forecast stays within so many nodes of its first value."""
_OUTLIER_MINUTES = (3, 2, 1)
"""Excursions of so many minutes that end where they began are smoothed away."""


@dataclass(frozen=True)
class ForecastBounds:
    """Nodes that a forecast never leaves. The code has 8 to 32 for its trace."""

    least: int = 8
    most: int = 32


def without_excursions(counts: Sequence[float]) -> list[float]:
    """Short excursions are smoothed away, and everything before the last extreme is levelled."""
    out = list(counts)
    for size in _OUTLIER_MINUTES:
        for i in range(len(out) - 1 - size):
            between = out[i + 1 : i + 1 + size]
            if out[i] == out[i + 1 + size] and all(value != out[i] for value in between):
                out[i + 1 : i + 1 + size] = [out[i]] * size
    low, high = min(out), max(out)
    target = low if low < min(out[0], out[-1]) else high if high > max(out[0], out[-1]) else None
    if target is not None:
        last = max(i for i, value in enumerate(out) if value == target)
        out[:last] = [target] * last
    return out


def fit_differences(counts: Sequence[float]) -> tuple[float, float]:
    """(constant, coefficient) of d_t = constant + coefficient * d_(t-1), d: differences."""
    steps = [b - a for a, b in itertools.pairwise(counts)]
    before, after = steps[:-1], steps[1:]
    if len(before) < 2:
        return 0.0, 0.0
    spread = pvariance(before) * len(before)
    mean_before, mean_after = fmean(before), fmean(after)
    if spread <= 0:
        return mean_after, 0.0
    pairs = zip(before, after, strict=True)
    slope = sum((x - mean_before) * (y - mean_after) for x, y in pairs) / spread
    slope = max(-0.95, min(0.95, slope))
    return mean_after - slope * mean_before, slope


def forecast(
    counts: Sequence[int],
    removed: Sequence[int],
    minutes: int,
    bounds: ForecastBounds,
    draw: random.Random,
) -> list[int]:
    """Nodes of the next `minutes` minutes.

    counts, removed: nodes, and nodes that went, of the minutes before, the newest last. If the
    autoregression sees no change after a window with losses, losses are drawn from a Poisson
    distribution, as in the code.
    """
    if counts.count(counts[-1]) == len(counts):  # no change, and no draw, in any of the rules below
        return [min(bounds.most, max(bounds.least, counts[-1]))] * minutes
    window = without_excursions([float(count) for count in counts])
    last = window[-1]
    if pstdev(window) == 0:
        ahead = [last] * minutes
    else:
        constant, slope = fit_differences(window)
        step, value, ahead = window[-1] - window[-2], last, []
        for _ in range(minutes):
            step = constant + slope * step
            value += step
            ahead.append(float(round(value)))
    first = ahead[0]
    ahead = [min(first + _GROWTH, max(first - _GROWTH, value)) for value in ahead]
    ahead = [float(min(bounds.most, max(bounds.least, value))) for value in ahead]
    drawn = [0] * minutes
    if pstdev(ahead) == 0 and pstdev(window) != 0 and removed:
        rate = min(pstdev(removed), pvariance(removed), fmean(removed))
        drawn = [_poisson(rate, draw) for _ in range(minutes)]
    grows, shrinks = _penalties(window)
    out, now, before = [], last, last
    for value, loss in zip(ahead, drawn, strict=True):
        change = value - before
        now += change * grows if change > 0 else change * shrinks
        now = max(0.0, float(round(now - loss * shrinks)))
        before = value
        out.append(int(now))
    return out


def _penalties(window: Sequence[float]) -> tuple[float, float]:
    """Factors on growth and on losses that are forecast, after a long climb or fall."""

    def factor(height: float) -> float:
        return 0.5 if height >= 10 else 0.75 if height >= 5 else 1.0

    pairs = list(itertools.pairwise(window))
    grows = factor(window[-1] - min(window)) if all(a <= b for a, b in pairs) else 1.0
    shrinks = factor(max(window) - window[-1]) if all(a >= b for a, b in pairs) else 1.0
    return grows, shrinks


def _poisson(mean: float, draw: random.Random) -> int:
    limit, product, count = exp(-mean), draw.random(), 0
    while product > limit:
        product *= draw.random()
        count += 1
    return count
