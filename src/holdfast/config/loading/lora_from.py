"""`lora.from: FOLDER`: rank, alpha and targets out of an adapter folder as PEFT writes it.

The run begins from the folder's weights. Loading replaces the key by `lora.adapter`, and gives
`lora.base` the folder of `model.from`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.borders import Border
from holdfast.config.huggingface.folder import read_json_object
from holdfast.config.loading.model_from import (
    Differences,
    ModelFolder,
    folder_at,
    refuse_other_values,
    yaml_word,
)
from holdfast.errors import ModelFolderError

KEY = "lora.from"
MEANING = (
    "adapter folder as PEFT writes it: gives rank, alpha and targets, and the values that the "
    "adapters begin with"
)
ADAPTER_CONFIG = "adapter_config.json"

KEYS = Border(
    ADAPTER_CONFIG,
    frozenset({"r", "lora_alpha", "target_modules", "lora_dropout"}),
    frozenset(
        {"auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "inference_mode"}
        | {"layers_pattern", "megatron_core", "peft_version", "qalora_group_size", "revision"}
        | {"runtime_config"}
    ),
    {
        "peft_type": ("LORA",),
        "task_type": ("CAUSAL_LM",),
        "bias": ("none",),
        "init_lora_weights": (True, "gaussian", "orthogonal"),
        **dict.fromkeys(
            (
                *("use_dora", "use_rslora", "use_qalora", "use_bdlora", "lora_bias"),
                *("fan_in_fan_out", "modules_to_save", "rank_pattern", "alpha_pattern"),
                *("layers_to_transform", "layer_replication", "exclude_modules"),
                *("target_parameters", "trainable_token_indices", "alora_invocation_tokens"),
                *("arrow_config", "loftq_config", "eva_config", "corda_config"),
                "megatron_config",
            ),
            (),
        ),
    },
)
"""What a plain adapter says. Other values of `plain` change what it computes, or its base."""
MERGE = "merge it into its base with PEFT, and train adapters of that"
CONVERT = (
    "its matrices belong to a base that PEFT changed: convert it with PEFT's save_pretrained and "
    "path_initial_model_for_weight_conversion, or merge it into that base"
)


@dataclass(frozen=True)
class AdapterFolder:
    """The folder that `lora.from` names. values: rank, alpha and targets as it has them."""

    path: Path
    values: dict[str, Any]
    keys_taken: tuple[str, ...]


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Return rank, alpha and targets of a PEFT folder. Raises ModelFolderError, one message with
    all keys, for an adapter that is not a plain one."""
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        raise ModelFolderError(
            f"there is no {ADAPTER_CONFIG} here",
            where=str(folder),
            remedy="name the folder of an adapter as PEFT writes it",
        )
    config = read_json_object(path)
    if _keeps_scale(config):  # an export of layers that are several of ours
        config = {k: v for k, v in config.items() if k not in ("rank_pattern", "alpha_pattern")}
    strange = list(KEYS.problems(config))
    rank, alpha, targets = (config.get(key) for key in ("r", "lora_alpha", "target_modules"))
    if isinstance(targets, str) and targets != "all-linear":
        strange.append(f"target_modules {yaml_word(targets)}")
    if strange:
        changes_base = any(clause.startswith("init_lora_weights") for clause in strange)
        raise ModelFolderError(
            f"this adapter has {', '.join(strange)}, which Holdfast does not compute",
            where=str(path),
            remedy=CONVERT if changes_base else MERGE,
        )
    if not isinstance(rank, int) or not isinstance(alpha, int | float) or not targets:
        raise ModelFolderError(
            "this has no r, lora_alpha and target_modules", where=str(path), remedy="fetch it again"
        )
    named = [targets] if isinstance(targets, str) else sorted(map(str, targets))
    return {"rank": rank, "alpha": float(alpha), "targets": named}


def _keeps_scale(config: Mapping[str, Any]) -> bool:
    """Return True if all patterns are whole multiples of rank and alpha, and alpha / rank stays."""
    ranks: object = config.get("rank_pattern")
    alphas: object = config.get("alpha_pattern")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(ranks, dict) or not isinstance(alphas, dict) or ranks.keys() != alphas.keys():
        return False
    if not isinstance(rank, int) or not isinstance(alpha, int | float) or not rank:
        return False
    return all(
        isinstance(own, int) and own % rank == 0 and alphas[name] == alpha * (own // rank)
        for name, own in ranks.items()
    )


def expand(
    data: dict[str, Any], base: str, model: ModelFolder | None
) -> tuple[dict[str, Any], AdapterFolder | None, tuple[str, ...]]:
    """The run file's values without `lora.from`, the adapter folder, and the keys of `model`'s
    folder that were taken.

    base: the folder that a relative path starts at. Raises ConfigError and ModelFolderError."""
    section = data.get("lora")
    named = section.get("from") if isinstance(section, dict) else section
    if isinstance(named, list):
        raise ModelFolderError(
            f"a run trains one adapter, and this names {len(named)}",
            where=KEY if isinstance(section, dict) else "lora",
            remedy="begin a run for each, with the same model.from",
        )
    if not isinstance(section, dict) or not section:
        return data, None, ()
    own = {key: value for key, value in section.items() if key != "from"}
    named, adapter = section.get("from"), None
    if named is not None:
        path = folder_at(KEY, named, base)
        values = read_adapter_config(path)
        taken = tuple(f"lora.{key}" for key in values if key not in own)
        adapter = AdapterFolder(path, values, (*taken, "lora.adapter"))
        own = {**values, **own, "adapter": str(path)}
    by_model: tuple[str, ...] = ()
    if model is not None and model.model is not None and not own.get("base"):
        own["base"], by_model = str(model.path), ("lora.base",)
    return {**data, "lora": own}, adapter, by_model


def refuse_differences(
    folder: AdapterFolder, values: Mapping[str, Any], place: Callable[[str], str]
) -> None:
    """Raises ConfigError, one message with all keys, when the run file says something else.
    values: those of `lora` in the run file."""
    found = {
        key: (values[key], theirs)
        for key, theirs in folder.values.items()
        if (sorted(values[key]) if key == "targets" else values[key]) != theirs
    }
    refuse_other_values("lora", found, _describe, folder.path, KEY, place)


def _describe(differences: Differences, folder: str) -> str:
    parts = [
        f"lora.{key} is {yaml_word(list(a) if isinstance(a, tuple) else a)} here and "
        f"{yaml_word(b)} there"
        for key, (a, b) in differences.items()
    ]
    return f"the adapter of {folder} is another one: {', '.join(parts)}"
