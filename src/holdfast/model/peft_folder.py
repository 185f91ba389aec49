"""Adapter folders as PEFT writes them: adapter_config.json and adapter_model.safetensors.

base_model.model.<layer of Hugging Face>.lora_A.weight    [rank, inputs]
base_model.model.<layer of Hugging Face>.lora_B.weight    [outputs, rank]
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from holdfast.config.huggingface.weight_files import ADAPTER
from holdfast.config.sections.lora import LoraConfig
from holdfast.config.sections.model import ModelConfig
from holdfast.core.format.stored_weights import PREFIX, check_adapter
from holdfast.core.sharding.adapters import DOWN, UP, adapted_layers, linear_layers
from holdfast.core.sharding.parameters import SCORE
from holdfast.errors import ModelFolderError
from holdfast.model.new_folder import new_folder

VERSION_FILE = "holdfast.json"


def read_adapter(folder: Path, model: ModelConfig, lora: LoraConfig) -> dict[str, Tensor]:
    """Our parameter name -> value, of every row. Raises ModelFolderError for a folder that does not
    hold exactly the adapters of the run file."""
    path, parts = folder / ADAPTER, check_adapter(folder, model, lora)
    tensors: dict[str, Tensor] = {}
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            for each in parts.values():
                tensors[each.stored.name] = file.get_tensor(each.stored.name)
    except (SafetensorError, OSError) as error:
        raise ModelFolderError(
            f"this is not a complete safetensors file ({error})",
            where=str(path),
            remedy="fetch it again",
        ) from error
    found, kept = dict[str, Tensor](), dict[str, int]()
    for ours, part in parts.items():
        name = part.stored.name
        found[ours] = tensors[name][part.rows, part.columns].contiguous()
        kept[name] = kept.get(name, 0) + int(found[ours].count_nonzero())
    for name, number in kept.items():
        if number != int(tensors[name].count_nonzero()):
            raise ModelFolderError(
                f"tensor {name} mixes parts of a layer that is several of Holdfast's",
                where=str(path),
                remedy="merge the adapter with PEFT, and name the result in model.from",
            )
    return found


def write_adapter(
    folder: Path,
    model: ModelConfig,
    lora: LoraConfig,
    tensors: Mapping[str, Tensor],
    version: Mapping[str, Any],
) -> None:
    """Write a folder for `PeftModel.from_pretrained`. tensors: by our names. version: of the
    adapter, which gets a file of its own and stands in the weights' metadata. A layer that is
    several of ours gets one adapter: the rows of all A, and all B as blocks of a diagonal.

    Raises ModelFolderError as `new_folder` does."""
    layers, adapted = linear_layers(model), adapted_layers(model, lora)
    parts: dict[str, list[str]] = {}  # their layer -> ours, several of a fused one
    for ours, (theirs, _) in layers.items():
        parts.setdefault(theirs, []).append(ours)
    chosen = {theirs: own for theirs, own in parts.items() if not adapted.keys().isdisjoint(own)}
    targets = _target_modules(set(chosen), list(parts))
    config, named = peft_config(lora, lora.base, targets), dict[str, Tensor]()
    ranks, alphas = dict[str, int](), dict[str, float]()
    for theirs, own in chosen.items():
        downs = [tensors[f"{ours}.{DOWN}"] for ours in own if ours in adapted]
        none = downs[0].new_zeros
        ups = [
            tensors[f"{ours}.{UP}"] if ours in adapted else none(layers[ours][1][0], 0)
            for ours in own
        ]
        named[f"{PREFIX}{theirs}.{DOWN}.weight"] = torch.cat(downs)
        named[f"{PREFIX}{theirs}.{UP}.weight"] = torch.block_diag(*ups)  # type: ignore[no-untyped-call]
        if len(downs) > 1:  # the same scale, by a larger rank
            ranks[theirs] = lora.rank * len(downs)
            alphas[theirs] = config["lora_alpha"] * len(downs)
    patterns: dict[str, Any] = {}
    if ranks:
        patterns = {"rank_pattern": ranks, "alpha_pattern": alphas}
    if not model.has_language_head:
        named[f"{PREFIX}{SCORE}"] = tensors[SCORE]
        patterns |= {"task_type": "SEQ_CLS", "modules_to_save": ["score"]}
    _write(folder, named, config | patterns, version)


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
