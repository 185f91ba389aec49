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

from holdfast.config.huggingface.weight_files import ADAPTER
from holdfast.config.sections.lora import LoraConfig
from holdfast.config.sections.model import ModelConfig
from holdfast.core.format.stored_weights import PREFIX, check_adapter, peft_names
from holdfast.core.sharding.adapters import adapted_layers, linear_layers
from holdfast.errors import ModelFolderError
from holdfast.model.new_folder import new_folder

VERSION_FILE = "holdfast.json"


def read_adapter(folder: Path, model: ModelConfig, lora: LoraConfig) -> dict[str, Tensor]:
    """Our parameter name -> value, of every row. Raises ModelFolderError for a folder that does not
    hold exactly the adapters of the run file."""
    path, stored = folder / ADAPTER, check_adapter(folder, model, lora)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {ours: file.get_tensor(each.name) for ours, each in stored.items()}
    except (SafetensorError, OSError) as error:
        raise ModelFolderError(
            f"this is not a complete safetensors file ({error})",
            where=str(path),
            remedy="fetch it again",
        ) from error


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
        (partial / ADAPTER).write_bytes(save(values, {"format": "pt", **metadata}))
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
