"""Detects a jump of the loss. Pure.

A loss has jumped if it is far above the line through the losses of earlier steps. "Far" means many
scatters, and a rise that matters. A falling loss is no scatter, nor is noise a jump.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class LossJumpLimits:
    """Limits of a normal loss. A loss has jumped if it is above the line through earlier steps by
    two amounts: `min_scatters` scatters (1.48 median absolute deviations) and `min_rise_nats` nats.
    At least `min_steps` earlier steps are needed."""

    min_steps: int = 20
    min_scatters: float = 8.0
    min_rise_nats: float = 0.3


@dataclass(frozen=True)
class LossJump:
    """A jump. microbatches: those that lie above the threshold by half as much as the highest one,
    as each varies more than their mean."""

    loss: float  # of the step, mean per token
    threshold: float  # above which it has jumped
    microbatches: tuple[int, ...]


def find_loss_jump(
    previous_losses: Sequence[float],
    losses: Sequence[float],
    tokens: float,
    limits: LossJumpLimits | None = None,
) -> LossJump | None:
    """previous_losses: the losses of the steps before, means per token. losses: of each microbatch,
    sums, over `tokens` tokens in all; each microbatch is taken to have as many as any other."""
    limit = _jump_threshold(previous_losses, limits or LossJumpLimits())
    mean = sum(losses) / (tokens or 1)
    if limit is None or mean <= limit:
        return None
    each = (tokens or 1) / max(1, sum(loss != 0 for loss in losses))
    above = [loss / each - limit for loss in losses]
    high = tuple(leaf for leaf, rise in enumerate(above) if rise > 0 and 2 * rise >= max(above))
    return LossJump(mean, limit, high)


def _jump_threshold(losses: Sequence[float], limits: LossJumpLimits) -> float | None:
    if len(losses) < limits.min_steps:
        return None
    half = len(losses) // 2
    slope = median((b - a) / half for a, b in zip(losses, losses[half:], strict=False))
    level = [loss + slope * (len(losses) - at) for at, loss in enumerate(losses)]
    middle = median(level)
    scatter = 1.4826 * median(abs(loss - middle) for loss in level)
    return middle + max(limits.min_scatters * scatter, limits.min_rise_nats)
