"""Advantages of generated rows from the rewards of their groups, as in TRL 1.16. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.config.sections.objective import ObjectiveConfig

SOURCE = "source"
"""The side tensor with the number of a row's source of prompts, in `rollout.sources`."""
STD_EPSILON = 1e-4
"""Added to a standard deviation of rewards, as in TRL."""


def row_values(
    config: ObjectiveConfig,
    rewards: NDArray[np.float64],
    kl: NDArray[np.float64] | None = None,
    of_step: NDArray[np.float64] | None = None,
) -> dict[str, NDArray[np.float64]]:
    """Return the side tensors of the rows of complete groups, [prompts, samples] each.

    Args:
        config: the section `objective`, of a kind that generates its rows. A distillation
            reports rewards alone.
        rewards: [prompts, samples].
        kl: of each row, [prompts, samples]: rloo subtracts beta times it.
        of_step: rewards of all rows of the step, for scale_rewards batch.
    """
    said = rewards
    if kl is not None and config.kind == "rloo":
        rewards = rewards - config.number("beta") * kl
    std = group_std(rewards)
    found = {
        "reward": said,
        "reward_std": std,
        "frac_reward_zero_std": np.isclose(std, 0.0).astype(np.float64),
    }
    if config.kind == "distill":
        return found
    if config.kind == "ppo":
        return found | {"score": rewards}
    of_rloo = config.kind == "rloo"
    advantages = (
        leave_one_out(rewards)
        if of_rloo
        else group_advantages(rewards, config.text("scale_rewards"), of_step)
    )
    return found | {"advantages": advantages}


def group_advantages(
    rewards: NDArray[np.float64], scale: str, of_step: NDArray[np.float64] | None = None
) -> NDArray[np.float64]:
    """Return GRPO's advantages: rewards minus the mean of their group, over a standard deviation.

    Args:
        rewards: [prompts, samples].
        scale: group, batch: the standard deviation of the group, or of `of_step`; none: nothing.
        of_step: rewards of all rows of the step.
    """
    centred: NDArray[np.float64] = rewards - rewards.mean(axis=1, keepdims=True)
    if scale == "none":
        return centred
    std: Any = group_std(rewards)
    if scale == "batch":
        assert of_step is not None, "the feed has waited for the step's groups"
        std = of_step.std(ddof=1) if of_step.size > 1 else 0.0
    divided: NDArray[np.float64] = centred / (std + STD_EPSILON)
    return divided


def group_std(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the standard deviation of each reward's group, [prompts, samples]. Of one sample it
    is 0."""
    if rewards.shape[1] < 2:
        return np.zeros_like(rewards)
    repeated: NDArray[np.float64] = np.broadcast_to(
        rewards.std(axis=1, ddof=1, keepdims=True), rewards.shape
    )
    return repeated


def leave_one_out(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return RLOO's advantages: each reward minus the mean of the rest of its group.

    Args:
        rewards: [prompts, samples], minus beta times the row's KL if beta is above 0.
    """
    if (samples := rewards.shape[1]) < 2:
        return np.zeros_like(rewards)
    rest = (rewards.sum(axis=1, keepdims=True) - rewards) / (samples - 1)
    difference: NDArray[np.float64] = rewards - rest
    return difference
