"""Classes and functions that a run file names by their path, loaded (`tasks/named.py`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from holdfast.config.train import TrainConfig
from holdfast.core.lr_schedule import RateFunction, learning_rate
from holdfast.train.torch_optimizer import MakeOptimizer


@dataclass(frozen=True)
class UserParts:
    """None: the run file names one of ours. rate: of a step, by the loop of a script."""

    optimizer: MakeOptimizer | None = None
    schedule: RateFunction | None = None
    rate: Callable[[int], float] | None = None

    def learning_rate(self, train: TrainConfig, step: int) -> float:
        """The rate that a step is applied with. Raises UserError for a function that fails."""
        if self.rate is not None:
            return self.rate(step)
        return learning_rate(train, step, self.schedule)
