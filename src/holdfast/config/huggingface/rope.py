"""Rotary embedding in `config.json`: bases, scalings, and blocks without it.

Public repositories say `rope_theta` and `rope_scaling` on top, which every release of
`transformers` reads and which is written here. The form of transformers 5 (`rope_parameters`) is
read too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from holdfast.config.huggingface.rules import (
    FULL,
    WINDOW,
    Config,
    NotSupportedError,
    Rule,
    Values,
    number,
)
from holdfast.config.sections.model import ModelConfig, RopeScaling

SCALING_KEYS: dict[str, dict[str, str]] = {
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_max_position",
    },
    "linear": {"factor": "factor"},
    "yarn": {
        "factor": "factor",
        "original_max_position_embeddings": "original_max_position",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "attention_factor": "attention_factor",
        "truncate": "truncate",
    },
}
"""Type -> their key -> ours."""

_ANY_TYPE = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned")
ALL_TYPES = tuple(SCALING_KEYS)


def rotary(
    absent_theta: float = 10_000.0,
    *,
    scalings: tuple[str, ...] = ALL_TYPES,
    partial: bool = False,
) -> Rule:
    """One base for all blocks. scalings: types that the architecture has. partial: it may turn a
    part of each head only."""

    def read(config: Config) -> Values:
        parameters = _section(config, "rope_parameters")
        scaling = parameters or _section(config, "rope_scaling")
        theta = parameters.get("rope_theta") or config.get("rope_theta") or absent_theta
        values: Values = {
            "rope_theta": theta,
            "rope_scaling": read_scaling(scaling, config, scalings),
        }
        fraction = parameters.get("partial_rotary_factor") or config.get("partial_rotary_factor")
        if partial:
            values["rope_fraction"] = fraction or 1.0
        elif fraction not in (None, 1, 1.0):
            raise NotSupportedError(f"partial_rotary_factor {fraction!r} is not supported")
        return values

    def write(model: ModelConfig) -> Values:
        out: Values = {
            "rope_theta": model.rope_theta,
            "rope_scaling": write_scaling(model.rope_scaling),
        }
        return out | ({"partial_rotary_factor": model.rope_fraction} if partial else {})

    keys = (
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "partial_rotary_factor",
        "original_max_position_embeddings",
    )
    return Rule(keys, read, write)


def rotary_by_kind(absent_theta: float, absent_window_theta: float) -> Rule:
    """Gemma 3: blocks with a window have a base of their own, and no scaling."""

    def read(config: Config) -> Values:
        parameters = _section(config, "rope_parameters")
        whole, near = _section(parameters, FULL), _section(parameters, WINDOW)
        if near.get("rope_type", "default") != "default":
            raise NotSupportedError(f"rope scaling of {WINDOW} is not supported")
        theta = whole.get("rope_theta") or config.get("rope_theta") or absent_theta
        own = near.get("rope_theta") or config.get("rope_local_base_freq") or absent_window_theta
        scaling = whole or _section(config, "rope_scaling")
        return {
            "rope_theta": theta,
            "window_rope_theta": own,
            "rope_scaling": read_scaling(scaling, config, ("linear",)),
        }

    def write(model: ModelConfig) -> Values:
        return {
            "rope_theta": model.rope_theta,
            "rope_local_base_freq": model.window_rope_theta or model.rope_theta,
            "rope_scaling": write_scaling(model.rope_scaling),
        }

    keys = ("rope_theta", "rope_local_base_freq", "rope_scaling", "rope_parameters")
    return Rule(keys, read, write)


def unturned_blocks() -> Rule:
    """SmolLM 3: `no_rope_layers` has a 0 for each block without rotary embedding."""

    def write(model: ModelConfig) -> Values:
        without = set(model.no_rope_layers)
        return {"no_rope_layers": [int(i not in without) for i in range(model.layers)]}

    keys = ("no_rope_layers", "no_rope_layer_interval")
    return Rule(keys, lambda config: {"no_rope_layers": unturned(config)}, write)


def unturned(config: Config) -> list[int]:
    """Numbers of SmolLM 3's blocks without rotary embedding; every fourth where nothing is said."""
    layers = int(number(config, "num_hidden_layers"))
    turned = config.get("no_rope_layers")
    if turned is None:
        interval = int(number(config, "no_rope_layer_interval", 4))
        turned = [(i + 1) % interval != 0 for i in range(layers)]
    if not isinstance(turned, list) or len(turned) != layers:
        raise NotSupportedError(f"no_rope_layers has not one entry for each of {layers} blocks")
    return [i for i, has in enumerate(turned) if not has]


def read_scaling(
    scaling: Mapping[str, Any], config: Config, types: tuple[str, ...]
) -> Values | None:
    """Their scaling in our keys; None where there is none."""
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return None
    if kind not in types:
        known = ", ".join(types) or "none"
        raise NotSupportedError(
            f"rope scaling of type {kind!r} is not supported", f"known: {known}"
        )
    names = SCALING_KEYS[kind]
    more = ("mscale", "mscale_all_dim") if kind == "yarn" else ()
    for key, value in scaling.items():
        if key not in names and key not in (*_ANY_TYPE, *more) and value is not None:
            raise NotSupportedError(f"key {key} of rope scaling {kind} is not understood")
    values: Values = {"type": kind}
    for theirs, ours in names.items():
        if scaling.get(theirs) is not None:
            values[ours] = scaling[theirs]
    if "original_max_position" in names.values():
        outside = config.get("original_max_position_embeddings")  # it counts first
        if outside is not None:
            values["original_max_position"] = outside
        values.setdefault("original_max_position", config.get("max_position_embeddings"))
    if "factor" not in values:
        if kind != "yarn":
            raise KeyError("factor")
        values["factor"] = number(config, "max_position_embeddings") / number(
            values, "original_max_position"
        )
    if kind == "llama3":
        for key in ("low_freq_factor", "high_freq_factor"):
            number(values, key)
    _read_mscale(scaling, values)
    return values


def _read_mscale(scaling: Mapping[str, Any], values: Values) -> None:
    """DeepSeek's two numbers in place of yarn's attention_factor."""
    if "attention_factor" in values or not (
        scaling.get("mscale") and scaling.get("mscale_all_dim")
    ):
        return
    factor = number(values, "factor")

    def grown(key: str) -> float:
        return 1.0 if factor <= 1 else 0.1 * number(scaling, key) * math.log(factor) + 1.0

    values["attention_factor"] = grown("mscale") / grown("mscale_all_dim")


def write_scaling(scaling: RopeScaling | None) -> Values | None:
    """Our scaling in their keys."""
    if scaling is None:
        return None
    values = {theirs: getattr(scaling, ours) for theirs, ours in SCALING_KEYS[scaling.type].items()}
    if values.get("attention_factor") == 0:
        del values["attention_factor"]
    return {"rope_type": scaling.type, **values}


def _section(config: Config, key: str) -> Mapping[str, Any]:
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise NotSupportedError(f"{key} {value!r} is not a section of keys")
    return value
