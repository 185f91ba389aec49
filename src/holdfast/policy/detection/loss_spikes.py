"""Detects a jump of the loss. Pure.

A loss has jumped if it is far above the line through the losses of earlier steps. "Far" means many
scatters, and a rise that matters. A falling loss is no scatter, nor is noise a jump.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Limits:
    """Limits of a normal loss. A loss has jumped if it is above the line through earlier steps by
    two amounts: `times` scatters (1.48 median absolute deviations) and `rise` nats. At least
    `least` earlier steps are needed."""

    least: int = 20
    times: float = 8.0
    rise: float = 0.3


@dataclass(frozen=True)
class Jump:
    """loss: of the step, mean per token. limit: above which it has jumped. microbatches: those that
    lie above it by half as much as the highest one, as each varies more than their mean."""

    loss: float
    limit: float
    microbatches: tuple[int, ...]


def jumped(
    before: Sequence[float], losses: Sequence[float], tokens: int, limits: Limits | None = None
) -> Jump | None:
    """before: the losses of the steps before, means per token. losses: of each microbatch, sums,
    over `tokens` tokens in all; each microbatch is taken to have as many as any other."""
    limit = _limit(before, limits or Limits())
    mean = sum(losses) / max(tokens, 1)
    if limit is None or mean <= limit:
        return None
    each = max(tokens, 1) / max(1, sum(loss != 0 for loss in losses))
    above = [loss / each - limit for loss in losses]
    high = tuple(leaf for leaf, rise in enumerate(above) if rise > 0 and 2 * rise >= max(above))
    return Jump(mean, limit, high)


def _limit(losses: Sequence[float], limits: Limits) -> float | None:
    if len(losses) < limits.least:
        return None
    half = len(losses) // 2
    slope = median((b - a) / half for a, b in zip(losses, losses[half:], strict=False))
    level = [loss + slope * (len(losses) - at) for at, loss in enumerate(losses)]
    middle = median(level)
    scatter = 1.4826 * median(abs(loss - middle) for loss in level)
    return middle + max(limits.times * scatter, limits.rise)
