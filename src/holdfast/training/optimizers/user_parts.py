"""Classes and functions that a run file names by their path, loaded (`tasks/named/named.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from holdfast.config.sections.optimizer import OptimizerConfig
from holdfast.config.sections.train import TrainConfig
from holdfast.core.lr_schedule import RateFunction, learning_rate
from holdfast.core.sharding.parameters import Parameter
from holdfast.training.optimizers.torch_optimizer import MakeOptimizer, TorchOptimizer

MakeParts = Callable[
    [OptimizerConfig, Sequence[Parameter], Sequence[Tensor]], Sequence[TorchOptimizer]
]
"""From the rows and the parameters of a rank, as `make_optimizer`."""


@dataclass(frozen=True)
class UserParts:
    """None: the run file names one of ours. rate: of a step, by the loop of a script. parts: the
    optimizers that a script keeps; none of them if the run has AdamW. options: digest of all that
    a script's optimizers have in a step."""

    optimizer: MakeOptimizer | None = None
    schedule: RateFunction | None = None
    rate: Callable[[int], float] | None = None
    parts: MakeParts | None = None
    options: Callable[[int], int] = lambda step: 0

    def learning_rate(self, train: TrainConfig, step: int) -> float:
        """The rate that a step is applied with. Raises UserError for a function that fails."""
        if self.rate is not None:
            return self.rate(step)
        return learning_rate(train, step, self.schedule)
