"""A run of adapters: what has to be known of its base before the run begins."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.config.huggingface.convert import shape_differences
from holdfast.config.huggingface.folder import read_folder_model
from holdfast.config.loading.load import LoadedConfig, PlannedValues
from holdfast.config.loading.model_from import TRANSFORMERS_TASK, describe_differences
from holdfast.config.run import RunConfig
from holdfast.config.sections.lora import LoraConfig
from holdfast.core.sharding.adapters import adapted_layers, linear_layers, refuse_unknown_targets
from holdfast.core.sharding.parameters import count_parameters
from holdfast.core.sharding.run_table import run_parameters
from holdfast.data.read.weight_files import refuse_other_weights, weights_checksum
from holdfast.errors import ConfigError


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
    base = Path(lora.base)
    if differences := shape_differences(config.model, read_folder_model(base)):
        raise ConfigError(
            describe_differences(differences, str(base)),
            where=loaded.where("lora.base"),
            remedy="give the shape with model.from, or name the base of that shape",
        )
    before = LoraConfig.model_validate(stored["lora"]) if stored.get("lora") else None
    values = _checked(loaded, "base", before)
    return values | _checked(loaded, "adapter", before) if lora.adapter else values


def joining_base(loaded: LoadedConfig) -> PlannedValues:
    """Return the base of a node that joins. It is compared before the node takes part: a worker
    that finds another one ends the run. Raises UserError."""
    if not loaded.config.lora.rank or loaded.config.task.name:
        return {}
    return _checked(loaded, "base", None)


def describe_lora(config: RunConfig) -> list[str]:
    """A line about what is trained and what stays."""
    lora = config.lora
    if not lora.rank:
        return []
    trained = sum(row.size for row in run_parameters(config))
    if config.task.name:
        return [
            f"lora: trains {trained} parameters of adapters; those of {config.task.name} itself "
            f"stay (checksum {lora.base_checksum})"
        ]
    begins = f", which begin as those of {lora.adapter}" if lora.adapter else ""
    return [
        f"lora: trains {trained} parameters of adapters in "
        f"{len(adapted_layers(config.model, lora))} layers{begins}; "
        f"the {count_parameters(config.model)} of {lora.base} stay "
        f"(checksum {lora.base_checksum})"
    ]


def describe_first_weights(config: RunConfig) -> str:
    """What a run begins with if it has no checkpoint."""
    if config.lora.rank:
        adapters = (
            f"the adapters of {config.lora.adapter}" if config.lora.adapter else "new adapters"
        )
        return f"the base model and {adapters}"
    task = config.task
    if task.name == TRANSFORMERS_TASK and task.args.get("pretrained", True):
        return f"the weights of {task.args['folder']}"
    return "initial weights"


def _checked(
    loaded: LoadedConfig, part: str, stored: LoraConfig | None
) -> dict[str, tuple[str, str]]:
    """The place and the checksum of the base's folder, or the adapter's."""
    lora, key = loaded.config.lora, f"{part}_checksum"
    folder = Path(os.path.abspath(getattr(lora, part)))
    expected = getattr(lora, key) or (getattr(stored, key) if stored is not None else "")
    if expected:
        refuse_other_weights(folder, expected, "lora.from" if part == "adapter" else "lora.base")
    values = {f"lora.{part}": str(folder), f"lora.{key}": expected or weights_checksum(folder)}
    return {name: (value, "the folder's") for name, value in values.items()}
