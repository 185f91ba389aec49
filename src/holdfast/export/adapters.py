"""A run of adapters for other programs: a PEFT folder, and the weights with adapters merged in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.config.loading.model_from import TRANSFORMERS_TASKS
from holdfast.config.sections.task import refuse_task
from holdfast.core.sharding.adapters import DOWN, UP, adapted_layers, packed_weights
from holdfast.core.sharding.parameters import SCORE, decoder_parameters
from holdfast.errors import ConfigError
from holdfast.export.weights import CheckpointWeights, TensorParts
from holdfast.launch.run.runs import Run


class MergedWeights:
    """The base's weights with a checkpoint's adapters merged in, in the dtype of the run's state,
    in full or in part. Raises ModelFolderError for another base than the run's."""

    def __init__(self, run: Run, checkpoint: Checkpoint):
        from holdfast.training.engine.task import open_weights

        config = run.config
        lora, self._scale = config.lora, config.lora.scale
        folder = Path(lora.base)
        self._base = open_weights(config.model, folder, lora.base_checksum, "lora.base")
        self._adapters = CheckpointWeights(run, checkpoint)
        self._packed = packed_weights(config.model, lora)
        self._layers = frozenset(adapted_layers(config.model, config.lora))
        self._rows = {row.name: row for row in decoder_parameters(config.model)}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._rows)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._rows[name].shape)

    def whole(self, name: str) -> Any:
        shape = self.shape(name)
        return self.box(name, (0,) * len(shape), shape)

    def dtype(self, name: str) -> Any:
        return self._adapters.dtype(self._adapters.names[0])

    def box(self, name: str, offsets: Sequence[int], lengths: Sequence[int]) -> Any:
        from holdfast.model.lora import merged
        from holdfast.model.nf4 import rounded

        if name == SCORE:
            return self._adapters.box(name, offsets, lengths)
        base = self._base.box(name, offsets, lengths).to(self.dtype(name))
        if name in self._packed:  # what the adapters were trained with
            base = rounded(base)
        layer = name.removesuffix(".weight")
        if layer not in self._layers or len(lengths) != 2:
            return base
        rank = self._adapters.shape(f"{layer}.{DOWN}")[0]
        down = self._adapters.box(f"{layer}.{DOWN}", (0, offsets[1]), (rank, lengths[1]))
        up = self._adapters.box(f"{layer}.{UP}", (offsets[0], 0), (lengths[0], rank))
        return merged(base, down, up, self._scale)


def run_weights(run: Run, checkpoint: Checkpoint) -> TensorParts:
    """All weights of the model that a run trains, whatever part of it the run keeps."""
    if not run.config.lora.rank:
        return CheckpointWeights(run, checkpoint)
    if not run.config.task.name:
        return MergedWeights(run, checkpoint)
    from holdfast.tasks.task.task_export import MergedTaskWeights

    return MergedTaskWeights(run.config, CheckpointWeights(run, checkpoint))


def write_peft_folder(to: Path, run: Run, checkpoint: Checkpoint) -> None:
    """Write the adapters alone, with the run and the step that they are of. Raises ConfigError for
    a run without adapters, ModelFolderError as `new_folder` does."""
    from holdfast.model.peft_folder import write_adapter, write_module_adapter

    task, lora = run.config.task, run.config.lora
    if task.name not in TRANSFORMERS_TASKS:
        refuse_task(task, "an export for PEFT")
    if not lora.rank:
        raise ConfigError(
            "this run trains the full model, so it has no adapters",
            where="lora",
            remedy="use --format hf",
        )
    weights = CheckpointWeights(run, checkpoint)
    version = {
        "name": lora.name,
        "run": run.config.name,
        "run_id": str(run.resolved.get("run_id", "")),
        "step": checkpoint.step,
        "base_checksum": lora.base_checksum,
    }
    tensors = {name: weights.whole(name) for name in weights.names}
    if not task.name:
        write_adapter(to, run.config.model, lora, tensors, version)
        return
    from holdfast.tasks.task.initial import linear_layers
    from holdfast.tasks.task.loading import load_task
    from holdfast.tasks.task.module import meta_module

    layers = linear_layers(meta_module(load_task(task)))
    write_module_adapter(to, str(task.args["folder"]), lora, layers, tensors, version)
