"""A run that begins with weights of a folder, or trains adapters of them: the checks of a start."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from holdfast.checkpoint.restore.catalog import list_commits
from holdfast.config.huggingface.architectures import DROPOUT
from holdfast.config.huggingface.folder import CONFIG, read_folder_model, read_json_object
from holdfast.config.huggingface.weight_files import StoredTensor, describe_unread, read_weights
from holdfast.config.loading.load import LoadedConfig, PlannedValues
from holdfast.config.loading.lora_from import ADAPTER_CONFIG
from holdfast.config.loading.model_from import TRANSFORMERS_TASKS, refuse_other_shape
from holdfast.config.run import RunConfig
from holdfast.config.sections.lora import LoraConfig
from holdfast.core.format.hf_names import huggingface_map
from holdfast.core.format.stored_weights import check_adapter, check_weights
from holdfast.core.sharding.adapters import (
    adapted_layers,
    linear_layers,
    refuse_bare_stage,
    refuse_unknown_targets,
)
from holdfast.core.sharding.parameters import count_parameters
from holdfast.core.sharding.run_table import run_parameters
from holdfast.data.read.weight_files import (
    refuse_not_finite,
    refuse_other_weights,
    weights_checksum,
)
from holdfast.errors import ConfigError
from holdfast.layout import Replica
from holdfast.plan.placing.balance import planned_stages
from holdfast.report.formatting import format_count
from holdfast.wire.store.run_store import RunStore

Read = Callable[[], Mapping[str, StoredTensor]]
IMPORTED = "imported"
"""The checksum's place in a run whose first weights `holdfast checkpoint import` wrote."""
NO_WEIGHTS = "name a folder that has them, or take the shape alone with model.weights=false"
"""Remedy for a folder of model.from without weights."""


def check_base(loaded: LoadedConfig, stored: Mapping[str, Any]) -> PlannedValues:
    """Check the section `lora`, and return the folders' places and checksums.

    stored: values of the run that continues, whose base must have stayed; none for a new one.
    Raises UserError."""
    config = loaded.config
    lora = config.lora
    if not lora.rank:
        return {}
    if not lora.base:
        raise ConfigError(
            f"lora.rank is {lora.rank}, and no folder gives the weights of the base",
            where=loaded.where("lora.rank"),
            remedy="add model: {from: FOLDER}",
        )
    layers = {ours: theirs for ours, (theirs, _) in linear_layers(config.model).items()}
    refuse_unknown_targets(lora.targets, layers, loaded.where("lora.targets"))
    refuse_bare_stages(loaded)
    base = Path(lora.base)
    refuse_other_shape(config.model, read_folder_model(base), base, loaded.where("lora.base"))
    before = LoraConfig.model_validate(stored["lora"]) if stored.get("lora") else None
    names = huggingface_map(config.model)
    values = _checked(loaded, "base", before, lambda: check_weights(base, names))
    if not lora.adapter:
        return values

    def adapter() -> dict[str, StoredTensor]:
        parts = check_adapter(Path(lora.adapter), config.model, lora).values()
        return {part.stored.name: part.stored for part in parts}

    return {**values, **_checked(loaded, "adapter", before, adapter)}


def check_first_weights(loaded: LoadedConfig, stored: Mapping[str, Any]) -> PlannedValues:
    """Check the folder of `model.weights`, and return its place, checksum and vocabulary.

    stored: values of the run that continues; none for a new one. If it began with initial weights,
    or with those of `holdfast checkpoint import`, the folder is not read. Raises UserError."""
    checksum = stored["model"].get("weights_checksum", "") if "model" in stored else None
    if checksum in ("", IMPORTED):
        return as_imported(checksum)
    model, key = loaded.config.model, "model.weights"
    if not model.weights:
        return {}
    folder = Path(model.weights)
    if checksum and not folder.is_dir():  # the state is that of a checkpoint
        return {f"{key}_checksum": (checksum, "the run's")}
    if not loaded.config.data.tokenizer.path:
        raise ConfigError(
            "the run would make a tokenizer of its own, and the weights know another one",
            where=str(folder),
            remedy="put tokenizer.json there, or name the model's own in data.tokenizer.path",
        )
    found = read_folder_model(folder)
    if not model.vocab_size:
        model = model.model_copy(update={"vocab_size": found.vocab_size})
    refuse_other_shape(model, found, folder, loaded.where(key))
    expected = model.weights_checksum or checksum or ""
    # A score head that the folder lacks begins with initial values.
    names = huggingface_map(model.model_copy(update={"score_head": found.score_head}))
    values = folder_values(folder, key, expected, lambda: check_weights(folder, names, NO_WEIGHTS))
    return {**values, "model.vocab_size": (model.vocab_size, "the folder's")}


def as_imported(checksum: str = IMPORTED) -> PlannedValues:
    """Return the keys of a run whose first weights are from another source than its run file."""
    values = {"model.weights": "", "model.weights_checksum": checksum}
    return {key: (value, "the run's") for key, value in values.items()}


def joining_weights(loaded: LoadedConfig, store: RunStore) -> PlannedValues:
    """Return the folders of a node that joins. They are compared before the node takes part: a
    worker that finds other weights ends the run. Raises UserError."""
    config = loaded.config
    if config.lora.rank and not config.task.name:
        return _checked(loaded, "base", None)
    folder = Path(config.model.weights)
    if not config.model.weights or (not folder.is_dir() and list_commits(store)):
        return {}  # the node takes its state from a checkpoint
    return folder_values(folder, "model.weights", config.model.weights_checksum)


def refuse_bare_stages(loaded: LoadedConfig) -> None:
    """Raises ConfigError if a worker of a pipeline would have no adapter to train."""
    config = loaded.config
    pipelines = (degrees for _, degrees in config.layout.kinds if degrees.pp > 1)
    for degrees in pipelines if config.lora.rank else ():
        shape, is_folded = degrees.mesh_shape, config.layout.is_folded
        stages = degrees.stages or planned_stages(config, shape)
        replica = Replica(0, tuple(range(degrees.ranks)), shape, stages, is_folded=is_folded)
        for pp in range(degrees.pp):
            blocks = replica.blocks(pp) or ()
            refuse_bare_stage(config.model, config.lora, blocks, loaded.where("lora.targets"))


def describe_lora(loaded: LoadedConfig) -> list[str]:
    """A line about what is trained and what stays."""
    config, lora = loaded.config, loaded.config.lora
    if not lora.rank:
        if loaded.origins["lora.rank"].kind not in ("file", "command line"):
            return []
        return [f"{loaded.where('lora.rank')}: lora.rank 0 trains all weights, without adapters"]
    trained = format_count(sum(row.size for row in run_parameters(config)))
    if config.task.name:
        return [
            f"lora: trains {trained} parameters of adapters; those of {config.task.name} itself "
            f"stay (checksum {lora.base_checksum})"
        ]
    begins = f", which begin as those of {lora.adapter}" if lora.adapter else ""
    return [
        f"lora: trains {trained} parameters of adapters in "
        f"{len(adapted_layers(config.model, lora))} layers{begins}; "
        f"the {format_count(count_parameters(config.model))} of {lora.base} stay "
        f"(checksum {lora.base_checksum})",
        *_unread(lora.base),
        *_dropout_of_model(lora.base),
        *_other_dropout(lora),
    ]


def _other_dropout(lora: LoraConfig) -> list[str]:
    """A line about the dropout that an adapter was trained with, which is not taken."""
    there = read_json_object(Path(lora.adapter) / ADAPTER_CONFIG) if lora.adapter else {}
    if (given := there.get("lora_dropout") or 0.0) == lora.dropout or not lora.adapter:
        return []
    return [f"lora.dropout is {lora.dropout:g}, and {given} in {lora.adapter}/{ADAPTER_CONFIG}"]


def _dropout_of_model(folder: str) -> list[str]:
    """A line about the dropout of a model's folder, which the decoder trains without."""
    path = Path(folder) / CONFIG
    there = read_json_object(path) if path.is_file() else {}
    said = ", ".join(f"{key} {there[key]}" for key in DROPOUT if there.get(key))
    return [f"{path} says {said}; this run trains without dropout of the model"] if said else []


def _unread(folder: str) -> list[str]:
    return describe_unread(Path(folder), read_weights(Path(folder)).values())


def describe_weights(loaded: LoadedConfig) -> list[str]:
    """A line about the weights that a new run of the full model begins with."""
    config, origin = loaded.config, loaded.origins["model.dim"]
    if config.model.weights:
        count = format_count(count_parameters(config.model))
        return [
            f"the run begins with the {count} parameters of {config.model.weights} "
            f"(checksum {config.model.weights_checksum})",
            *_unread(config.model.weights),
            *_dropout_of_model(config.model.weights),
        ]
    if origin.kind != "model folder" or config.lora.rank:
        return []
    line = f"model.weights is false: {origin.place} gives the shape, and weights are initial ones"
    return [line, *_dropout_of_model(origin.place)]


def describe_first_weights(config: RunConfig) -> str:
    """What a run begins with if it has no checkpoint."""
    if config.lora.rank:
        adapters = (
            f"the adapters of {config.lora.adapter}" if config.lora.adapter else "new adapters"
        )
        return f"the base model and {adapters}"
    if config.model.weights:
        return f"the weights of {config.model.weights}"
    task = config.task
    if task.name in TRANSFORMERS_TASKS and task.args.get("pretrained", True):
        return f"the weights of {task.args['folder']}"
    return "initial weights"


def _checked(
    loaded: LoadedConfig, part: str, stored: LoraConfig | None, read: Read | None = None
) -> PlannedValues:
    """The place and the checksum of the base's folder, or the adapter's."""
    lora, key = loaded.config.lora, f"{part}_checksum"
    expected = getattr(lora, key) or (getattr(stored, key) if stored is not None else "")
    return folder_values(Path(getattr(lora, part)), f"lora.{part}", expected, read)


def folder_values(folder: Path, key: str, expected: str, read: Read | None = None) -> PlannedValues:
    """The place and the checksum of a folder of weights, which must be `expected` if that is
    known. read: checks names and shapes. Raises ModelFolderError."""
    folder = Path(os.path.abspath(folder))
    if expected:
        refuse_other_weights(folder, expected, "lora.from" if key == "lora.adapter" else key)
    elif read is not None:
        refuse_not_finite(read().values())
    values = {key: str(folder), f"{key}_checksum": expected or weights_checksum(folder)}
    return {name: (value, "the folder's") for name, value in values.items()}
