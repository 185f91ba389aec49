"""Adapter folders as PEFT writes them: adapter_config.json and adapter_model.safetensors.

base_model.model.<layer of Hugging Face>.lora_A.weight    [rank, inputs]
base_model.model.<layer of Hugging Face>.lora_B.weight    [outputs, rank]
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from holdfast.config.sections.lora import LoraConfig
from holdfast.config.sections.model import ModelConfig
from holdfast.core.sharding.adapters import DOWN, UP, adapted_layers, linear_layers, lora_parameters
from holdfast.errors import ModelFolderError
from holdfast.model.new_folder import new_folder

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
VERSION_FILE = "holdfast.json"


def peft_names(model: ModelConfig, lora: LoraConfig) -> dict[str, str]:
    """Our parameter name -> PEFT's, of every row. Raises ModelFolderError if one layer of Hugging
    Face is several of ours."""
    layers = linear_layers(model)
    theirs = [name for name, _ in layers.values()]
    found: dict[str, str] = {}
    for ours in adapted_layers(model, lora):
        name = layers[ours][0]
        if theirs.count(name) > 1:
            raise ModelFolderError(
                f"{name} is one layer for PEFT and several of Holdfast's, so their adapters do not "
                "fit each other",
                remedy="export the merged model with --format hf",
            )
        for matrix in (DOWN, UP):
            found[f"{ours}.{matrix}"] = f"{PREFIX}{name}.{matrix}.weight"
    return found


def read_adapter(folder: Path, model: ModelConfig, lora: LoraConfig) -> dict[str, Tensor]:
    """Our parameter name -> value, of every row. Raises ModelFolderError for a folder that does not
    hold exactly the adapters of the run file."""
    path = folder / WEIGHTS
    names = peft_names(model, lora)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            there = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ModelFolderError(
            f"this is not a complete safetensors file ({error})",
            where=str(path),
            remedy="fetch it again",
        ) from error
    shapes = {row.name: row.shape for row in lora_parameters(model, lora)}
    missing = [theirs for theirs in names.values() if theirs not in there]
    unknown = sorted(there.keys() - set(names.values()))
    wrong = [
        theirs
        for ours, theirs in names.items()
        if theirs in there and tuple(there[theirs].shape) != shapes[ours]
    ]
    for what, found in (
        ("is missing", missing),
        ("belongs to no layer with an adapter", unknown),
        ("has another shape than the base's layer and lora.rank give it", wrong),
    ):
        if found:
            raise ModelFolderError(
                f"tensor {found[0]} {what}",
                where=str(path),
                remedy="name the base that the adapter was trained on in model.from",
            )
    return {ours: there[theirs] for ours, theirs in names.items()}


def write_adapter(
    folder: Path,
    model: ModelConfig,
    lora: LoraConfig,
    tensors: Mapping[str, Tensor],
    version: Mapping[str, Any],
) -> None:
    """Write a folder for `PeftModel.from_pretrained`. tensors: by our names. version: of the
    adapter, which gets a file of its own and stands in the weights' metadata.

    Raises ModelFolderError as `new_folder` does, and for a layer that PEFT does not have."""
    names, layers = peft_names(model, lora), linear_layers(model)
    chosen = {layers[ours][0] for ours in adapted_layers(model, lora)}
    targets = _target_modules(chosen, [name for name, _ in layers.values()])
    named = {names[ours]: value for ours, value in tensors.items()}
    _write(folder, named, peft_config(lora, lora.base, targets), version)


def write_module_adapter(
    folder: Path,
    base: str,
    lora: LoraConfig,
    layers: Iterable[str],
    tensors: Mapping[str, Tensor],
    version: Mapping[str, Any],
) -> None:
    """The same for a module that has the names of transformers itself. base: its folder. layers:
    the linear ones of the module. tensors: by the names of the module with adapters."""
    chosen = {name.rpartition(".")[0] for name in tensors}
    config = peft_config(lora, base, _target_modules(chosen, list(layers)))
    named = {f"{PREFIX}{name}.weight": value for name, value in tensors.items()}
    _write(folder, named, config, version)


def _write(
    folder: Path, named: Mapping[str, Tensor], config: Mapping[str, Any], version: Mapping[str, Any]
) -> None:
    """named: tensors by PEFT's names."""
    with new_folder(folder) as partial:
        metadata = {f"holdfast.{key}": str(value) for key, value in version.items()}
        values = {name: value.contiguous() for name, value in named.items()}
        (partial / WEIGHTS).write_bytes(save(values, {"format": "pt", **metadata}))
        for name, content in ((VERSION_FILE, version), ("adapter_config.json", config)):
            (partial / name).write_text(json.dumps(dict(content), indent=2) + "\n", "utf-8")


def peft_config(lora: LoraConfig, base: str, targets: list[str]) -> dict[str, Any]:
    """adapter_config.json of the run's adapters."""
    alpha = int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": alpha,
        "lora_dropout": lora.dropout,
        "target_modules": targets,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "use_dora": False,
        "use_rslora": False,
    }


def _target_modules(chosen: set[str], layers: Sequence[str]) -> list[str]:
    """The chosen layers' last names, if they mean these of all layers alone; full names
    otherwise."""
    ends = {name.rpartition(".")[2] for name in chosen}
    meant = {name for name in layers if name.rpartition(".")[2] in ends}
    return sorted(ends if meant == chosen else chosen)
