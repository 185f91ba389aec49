"""Adapters of the built-in decoder as the engine sees them (`training/engine/task.py`).

The base's weights are constants of the module. Each process reads them from the folder of
`lora.base`, compares their checksum, and keeps them over all generations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from holdfast.config.run import RunConfig
from holdfast.core.seeds import key_seed
from holdfast.core.sharding.adapters import adapted_layers, packed_weights, refuse_bare_stage
from holdfast.core.sharding.boxes import Box
from holdfast.core.sharding.parameters import SCORE, Parameter
from holdfast.data.read.weight_files import refuse_other_weights
from holdfast.data.stream.loader import Loader, TensorMicrobatch
from holdfast.model.lora import adapters_off, add_adapters, set_base
from holdfast.model.nf4 import Nf4Weight
from holdfast.model.peft_folder import read_adapter
from holdfast.model.stage import StagePart
from holdfast.parallel.axes.process_groups import ProcessGroups
from holdfast.training.engine.executors import token_arguments
from holdfast.training.engine.objective import NO_SIDE, NextTokenObjective
from holdfast.training.engine.precision import Precision
from holdfast.training.engine.state import InitialBox
from holdfast.training.engine.task import (
    DecoderBatches,
    DecoderTask,
    OpenBatches,
    TaskBatchSource,
    open_weights,
)
from holdfast.training.objectives.protocol import Side
from holdfast.training.objectives.weights import ADDED
from holdfast.training.optimizers.make_optimizer import UserParts

REFERENCE = "reference"


def _keyed_arguments(batch: Any) -> tuple[Any, ...]:
    """What the objective takes of a microbatch."""
    key = batch.key if isinstance(batch, TensorMicrobatch) else None
    return (*token_arguments(batch), key)


class LoraObjective(NextTokenObjective):
    """A decoder with adapters. In each pass with gradients each block draws its dropout from a seed
    of its own. So the numbers depend on no stage and on no other block."""

    def forward(  # type: ignore[override]
        self,
        tokens: Tensor,
        targets: Tensor,
        documents: Tensor | None = None,
        side: Side = NO_SIDE,
        key: int | None = None,
        incoming: Tensor | None = None,
        part: StagePart | None = None,
    ) -> Tensor:
        """As `NextTokenObjective.forward`. key: the seed of the microbatch; None: there is no
        dropout, or there are no gradients."""
        needs_base = incoming is None and part is None and self.needs_base(side)
        if needs_base and self.decoder.norm is not None:  # one stage has all of it
            base = self.base_forward(tokens, targets, documents)
            side = {**side, REFERENCE: base}
        self.decoder.before_block = None if key is None else partial(_begin_block, key)
        return super().forward(tokens, targets, documents, side, incoming, part)

    def needs_base(self, side: Side) -> bool:
        """Return True if the loss needs log-probabilities of the base, and `side` has none."""
        return self.loss is not None and REFERENCE in self.loss.needs and REFERENCE not in side

    @torch.no_grad()
    def base_forward(
        self,
        tokens: Tensor,
        targets: Tensor,
        documents: Tensor | None,
        incoming: Tensor | None = None,
        part: StagePart | None = None,
    ) -> Tensor:
        """Run a stage without its adapters. The last one returns the log-probabilities of targets
        under the base [B, S]."""
        self.decoder.before_block = None
        self.gives_log_probabilities = True
        try:
            with adapters_off(self.decoder):
                return NextTokenObjective.forward(
                    self, tokens, targets, documents, NO_SIDE, incoming, part
                )
        finally:
            self.gives_log_probabilities = False


def _begin_block(key: int, position: int) -> None:
    torch.manual_seed(key_seed(key, "block", position))


class LoraTask(DecoderTask):
    """Adapters of the decoder, trained to predict the next token."""

    objective_class = LoraObjective
    added_sides = ADDED | {REFERENCE}  # the base is the reference
    arguments = staticmethod(_keyed_arguments)

    def __init__(
        self,
        config: RunConfig,
        user_parts: UserParts | None = None,
        open_source: OpenBatches | None = None,
    ) -> None:
        super().__init__(config, user_parts, open_source)
        self._compute = Precision.of(config.train.precision).compute
        self._boxes: Mapping[str, Box] = {}  # what this rank has of the base
        self._base: dict[Box, Tensor | Nf4Weight] = {}

    def objective(self, groups: ProcessGroups) -> NextTokenObjective:
        """The rank's part of the decoder, whose parameters are its adapters. Raises ConfigError."""
        config, objective = self._config, super().objective(groups)
        decoder = objective.decoder
        blocks = decoder.layers.positions
        refuse_bare_stage(config.model, config.lora, blocks, "lora.targets")
        boxes = self.tensor_boxes(decoder, groups)
        self._boxes = {name: box for name, box in boxes.items() if name != SCORE}
        here = {
            layer: self._boxes[f"{layer}.weight"].offsets[1]
            for layer in adapted_layers(config.model, config.lora)
            if f"{layer}.weight" in self._boxes
        }
        with torch.device("meta"):
            add_adapters(decoder, here, config.lora, here)
        return objective

    def fill_constants(self, objective: nn.Module, device: torch.device) -> None:
        """Give the module what a decoder gets, and the base's weights. Raises ModelFolderError."""
        super().fill_constants(objective, device)
        if self._base.keys() != set(self._boxes.values()):
            model, lora = self._config.model, self._config.lora
            folder = open_weights(model, Path(lora.base), lora.base_checksum, "lora.base")
            packed = packed_weights(model, lora)
            self._base = {}
            for name, box in self._boxes.items():
                value = folder.box(name, box.offsets, box.lengths)
                self._base[box] = (
                    Nf4Weight.of(value.to(device), self._compute)
                    if name in packed
                    else value.to(device, self._compute, copy=True)
                )
        values = {name: self._base[box] for name, box in self._boxes.items()}
        set_base(cast(LoraObjective, objective).decoder, values)

    def initial_values(self, seed: int) -> InitialBox:
        """Those of the folder that the run continues, or new ones."""
        model, lora = self._config.model, self._config.lora
        given, new = dict[str, Tensor](), super().initial_values(seed)

        def value(row: Parameter, box: Box) -> Tensor:
            if row.name == SCORE:  # that of the base, if it is a reward model
                base = open_weights(model, Path(lora.base), lora.base_checksum, "lora.base")
                has_one = SCORE in base
                return base.box(SCORE, box.offsets, box.lengths) if has_one else new(row, box)
            if not lora.adapter:
                return new(row, box)
            if not given:
                folder = Path(lora.adapter)
                refuse_other_weights(folder, lora.adapter_checksum, "lora.from")
                given.update(read_adapter(folder, self._config.model, lora))
            cut = zip(box.offsets, box.stops, strict=True)
            return given[row.name][tuple(slice(start, stop) for start, stop in cut)]

        return value

    def loader(
        self, batches: TaskBatchSource, share: Callable[[int], Sequence[int]], **where: Any
    ) -> Loader:
        seed = self._config.seed if self._config.lora.dropout else None
        source = cast(DecoderBatches, batches)
        return Loader(source, share, seed=seed, weigh=self.weigher(), **where)
