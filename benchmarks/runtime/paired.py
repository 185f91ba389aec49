"""Paired ratios and how sure we are of them.

Two things that are timed in turn, again and again, see the same machine. The ratio within a round
cancels what the machine does meanwhile. The median of those ratios is quoted with a bootstrap
interval (Efron 1979). That is: redraw the rounds with replacement, take the median of each redraw,
quote the middle 95 %.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Estimate:
    """A median with its 95 % interval."""

    median: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def estimate(values: Sequence[float], draws: int = 2000) -> Estimate:
    """Median of at least one value and its bootstrap interval, the same for the same values."""
    generator = random.Random(1)
    medians = sorted(
        statistics.median(generator.choices(values, k=len(values))) for _ in range(draws)
    )
    return Estimate(
        statistics.median(values), medians[int(0.025 * draws)], medians[int(0.975 * draws)]
    )
