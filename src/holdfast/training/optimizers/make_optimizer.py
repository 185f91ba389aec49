"""Makes the optimizer that the run file names, for the parameters of one rank.

What a run file names by a path comes loaded by `tasks/named/named.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from holdfast.config.sections.optimizer import OptimizerConfig
from holdfast.config.sections.train import TrainConfig
from holdfast.core.lr_schedule import RateFunction, learning_rate
from holdfast.core.sharding.boxes import Box
from holdfast.core.sharding.optimizer_state import is_hidden_matrix, parameter_settings
from holdfast.core.sharding.parameters import Parameter
from holdfast.options.registry import hooks
from holdfast.training.memory.places import StateMemory
from holdfast.training.optimizers.offloaded_adamw import OffloadedAdamW
from holdfast.training.optimizers.optimizer import AdamW, Optimizer
from holdfast.training.optimizers.torch_optimizer import (
    MakeOptimizer,
    OptimizerParts,
    TorchOptimizer,
    built_in_class,
    groups_of_settings,
)

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


def make_optimizer(
    config: OptimizerConfig,
    rows: Sequence[Parameter],
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    user: UserParts | None = None,
    memory: StateMemory | None = None,
    boxes: Sequence[Box] | None = None,
) -> Optimizer:
    """rows: of the parameters that this rank holds a part of. user: what the run file names by a
    path, or a script keeps. memory: where the state lies; None: on the device. boxes: the parts;
    None: it holds all of each."""
    user = user or UserParts()
    settings = [parameter_settings(config, row) for row in rows]
    merges = {i: row.merge for i, row in enumerate(rows) if row.merge}
    for make_of_option in hooks("train.optimizer", config, lambda effect: effect.optimizer):
        return make_of_option(config, rows, parameters, gradients, boxes)
    if config.name == "adamw" and memory is not None and memory.stages_updates:
        return OffloadedAdamW(parameters, gradients, settings, config, merges, memory)
    if config.name == "adamw":
        return AdamW(parameters, gradients, settings, config, merges)
    if user.parts is not None and (parts := user.parts(config, rows, parameters)):
        return OptimizerParts(parameters, gradients, parts, None, merges)
    make = user.optimizer if config.is_class else built_in_class(config)
    if make is None:
        raise RuntimeError(f"{config.name} was not loaded")
    trained = [i for i, row in enumerate(rows) if not (row.merge or row.frozen)]
    rest: AdamW | None = None
    slots = config.state_slots
    if config.name == "muon":
        hidden = {i for i in trained if is_hidden_matrix(config, rows[i].name, rows[i].shape)}
        others = [i for i, r in enumerate(rows) if not is_hidden_matrix(config, r.name, r.shape)]
        rest = AdamW(parameters, gradients, settings, config, merges, others)
        trained, slots, merges = sorted(hidden), slots[:1], {}
    groups = groups_of_settings(settings, trained)
    part = TorchOptimizer(make, parameters, rows, groups, trained, slots, config)
    return OptimizerParts(parameters, gradients, [part], rest, merges)
