"""Adapters of the built-in decoder as the engine sees them (`training/engine/task.py`).

The base's weights are constants of the module. Each process reads them from the folder of
`lora.base`, compares their checksum, and keeps them over all generations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from holdfast.config.run import RunConfig
from holdfast.core.sharding.adapters import adapted_layers
from holdfast.core.sharding.boxes import Box
from holdfast.core.sharding.parameters import Parameter
from holdfast.data.read.weight_files import refuse_other_weights
from holdfast.data.stream.batch import Batches
from holdfast.data.stream.loader import Loader, TensorMicrobatch
from holdfast.model.decoder import Decoder
from holdfast.model.lora import add_adapters, set_base
from holdfast.model.peft_folder import read_adapter
from holdfast.parallel.axes.process_groups import ProcessGroups
from holdfast.training.engine.executors import Executor, SingleStageExecutor, token_arguments
from holdfast.training.engine.objective import NextTokenObjective
from holdfast.training.engine.precision import Precision
from holdfast.training.engine.state import InitialBox
from holdfast.training.engine.task import DecoderTask, TaskBatchSource, open_weights
from holdfast.training.optimizers.make_optimizer import UserParts


class LoraObjective(NextTokenObjective):
    """A decoder with adapters. Each pass with gradients draws its dropout from a seed of its own,
    which belongs to the microbatch."""

    def forward(  # type: ignore[override]
        self,
        tokens: Tensor,
        targets: Tensor,
        documents: Tensor | None = None,
        key: int | None = None,
    ) -> Tensor:
        """As `NextTokenObjective.forward` of one stage. key: the seed; None: there is no dropout,
        or there are no gradients."""
        if key is not None:
            torch.manual_seed(key)
        return super().forward(tokens, targets, documents)


class LoraTask(DecoderTask):
    """Adapters of the decoder, trained to predict the next token."""

    def __init__(self, config: RunConfig, user_parts: UserParts | None = None) -> None:
        super().__init__(config, user_parts)
        self._compute = Precision.of(config.train.precision).compute
        self._base: dict[str, Tensor] = {}

    def objective(self, groups: ProcessGroups) -> LoraObjective:
        """The decoder whose parameters are its adapters. Raises ConfigError."""
        config = self._config
        with torch.device("meta"):
            objective = LoraObjective(
                Decoder(config.model), config.train.compile, config.data.chat.weights
            )
            layers, lora = adapted_layers(config.model, config.lora), config.lora
            add_adapters(objective.decoder, layers, lora.rank, lora.scale, lora.dropout)
        return objective

    def fill_constants(self, objective: nn.Module, device: torch.device) -> None:
        """Give the module what a decoder gets, and the base's weights. Raises ModelFolderError."""
        super().fill_constants(objective, device)
        if not self._base:
            model, lora = self._config.model, self._config.lora
            folder = open_weights(model, Path(lora.base), lora.base_checksum, "lora.base")
            self._base = {
                name: folder[name].to(device, self._compute, copy=True) for name in folder
            }
        set_base(cast(LoraObjective, objective).decoder, self._base)

    def initial_values(self, seed: int) -> InitialBox:
        """Those of the folder that the run continues, or new ones."""
        lora = self._config.lora
        if not lora.adapter:
            return super().initial_values(seed)
        given: dict[str, Tensor] = {}

        def value(row: Parameter, box: Box) -> Tensor:
            if not given:
                folder = Path(lora.adapter)
                refuse_other_weights(folder, lora.adapter_checksum, "lora.from")
                given.update(read_adapter(folder, self._config.model, lora))
            cut = zip(box.offsets, box.stops, strict=True)
            return given[row.name][tuple(slice(start, stop) for start, stop in cut)]

        return value

    def executor(
        self, objective: nn.Module, groups: ProcessGroups, dtype: torch.dtype, device: torch.device
    ) -> Executor:
        return SingleStageExecutor(objective, groups.recorder, _keyed_arguments)

    def loader(
        self, batches: TaskBatchSource, share: Callable[[int], Sequence[int]], **where: Any
    ) -> Loader:
        seed = self._config.seed if self._config.lora.dropout else None
        return Loader(cast(Batches, batches), share, seed=seed, **where)


def _keyed_arguments(batch: Any) -> tuple[Any, ...]:
    """What the objective takes of a microbatch."""
    key = batch.key if isinstance(batch, TensorMicrobatch) else None
    return (*token_arguments(batch), key)
