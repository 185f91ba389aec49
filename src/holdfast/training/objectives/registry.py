"""The objectives by the kind that the run file names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isfinite

from holdfast.config.sections.objective import ObjectiveConfig
from holdfast.config.sections.rollout import RolloutConfig
from holdfast.errors import ConfigError
from holdfast.training.objectives.distill import Distill
from holdfast.training.objectives.policy import Grpo, PolicyLoss, Ppo, Rloo
from holdfast.training.objectives.preference import Dpo, Ipo, Kto, Orpo, Reward, Simpo, identity
from holdfast.training.objectives.protocol import Combine, Objective

MakeObjective = Callable[[ObjectiveConfig, Combine], Objective]

OBJECTIVES: Mapping[str, MakeObjective] = {
    "dpo": Dpo,
    "ipo": Ipo,
    "simpo": Simpo,
    "orpo": Orpo,
    "kto": Kto,
    "reward": Reward,
    "distill": Distill,
    "grpo": Grpo,
    "rloo": Rloo,
    "ppo": Ppo,
}


def sum_names(config: ObjectiveConfig, rollout: RolloutConfig) -> tuple[str, ...]:
    """Return the names of what the run's objective adds up next to the loss."""
    objective = make_objective(config, rollout=rollout)
    return () if objective is None else objective.names


def sum_names_of(module: object) -> tuple[str, ...]:
    """The names of what a module returns after its loss; none of one that returns the loss."""
    return getattr(module, "sum_names", ())


def means_of(names: Sequence[str], sums: Sequence[float]) -> dict[str, float]:
    """Return the means of sums and counts, one pair for each name. A name with a count of 0, or a
    mean that is not finite, is left out."""
    pairs = zip(names, sums[0::2], sums[1::2], strict=bool(sums))
    means = {name: total / count for name, total, count in pairs if count}
    return {name: mean for name, mean in means.items() if isfinite(mean)}


def make_objective(
    config: ObjectiveConfig, combine: Combine = identity, rollout: RolloutConfig | None = None
) -> Objective | None:
    """Return the run's objective; None: the next token. Raises ConfigError for a kind that does not
    exist yet.

    Args:
        combine: adds up over the ranks that share a microbatch's samples.
        rollout: the section of that name, whose rewards and sources are reported.
    """
    if config.is_next_token:
        return None
    make = OBJECTIVES.get(config.kind)
    if make is None:
        raise ConfigError(
            f"objective.kind {config.kind} cannot be trained yet",
            where="objective.kind",
            remedy=f"use one of {', '.join(OBJECTIVES)}",
        )
    objective = make(config, combine)
    if rollout is not None and isinstance(objective, PolicyLoss):
        objective.report(rollout.reward_names, rollout.sources)
    return objective
