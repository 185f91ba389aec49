"""Rules: what a key of `config.json` means for a key of `model:`, in both directions.

A rule owns some keys of `config.json`. `read` turns their values into model keys, `write` turns a
model into their values. `write` may lose something that its architecture cannot say. So an export
reads what was written once more and compares it with the model (`convert.differences_in`).

Public repositories say `rope_theta` and `rope_scaling` on top, which every release of
`transformers` reads and which is written here. The form of transformers 5 (`rope_parameters`) is
read too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.config.sections.model import ModelConfig, RopeScaling

Config = Mapping[str, Any]
Values = dict[str, Any]
REQUIRED = object()
"""`absent` of a key that config.json must have."""


class NotSupportedError(Exception):
    """A value that the decoder cannot compute with, or that is no value at all."""

    def __init__(self, message: str, remedy: str | None = None):
        super().__init__(message)
        self.message, self.remedy = message, remedy


@dataclass(frozen=True)
class Rule:
    """keys: of config.json. read: raises NotSupportedError, and KeyError for a missing key."""

    keys: tuple[str, ...]
    read: Callable[[Config], Values]
    write: Callable[[ModelConfig], Values]


def copy(theirs: str, ours: str, absent: Any = REQUIRED) -> Rule:
    """The same value under another name. absent: our value if the key is missing or null."""

    def read(config: Config) -> Values:
        value = config.get(theirs)
        if value is None:
            if absent is REQUIRED:
                raise KeyError(theirs)
            value = absent
        return {ours: value}

    return Rule((theirs,), read, lambda model: {theirs: getattr(model, ours)})


def limit(theirs: str, ours: str, absent: float) -> Rule:
    """A number of ours that is 0 where theirs is null. absent: our value if the key is missing."""

    def read(config: Config) -> Values:
        return {ours: config.get(theirs, absent) or 0}

    return Rule((theirs,), read, lambda model: {theirs: getattr(model, ours) or None})


def choice(theirs: str, ours: str, words: Mapping[Any, Any], absent: Any) -> Rule:
    """One of several words. words: theirs -> ours, the preferred ones first. absent: their word."""

    def read(config: Config) -> Values:
        value = config.get(theirs)
        value = absent if value is None else value
        if isinstance(value, list | dict) or value not in words:
            raise NotSupportedError(
                f"{theirs} {value!r} is not supported",
                f"the decoder knows {', '.join(map(str, words))}",
            )
        return {ours: words[value]}

    def write(model: ModelConfig) -> Values:
        value = getattr(model, ours)
        found = next((word for word, meaning in words.items() if meaning == value), absent)
        return {theirs: found}

    return Rule((theirs,), read, write)


def heads(*, always_head: bool = False, absent_head: int = 0, absent_kv: int = 0) -> Rule:
    """Numbers of heads, and the size of one.

    always_head: head_dim is written even if it follows from dim and heads. absent_*: what counts if
    a key is missing. 0: as many key/value heads as query heads, and dim / heads.
    """

    def read(config: Config) -> Values:
        number = config["num_attention_heads"]
        return {
            "heads": number,
            "kv_heads": config.get("num_key_value_heads", absent_kv) or number,
            "head_dim": config.get("head_dim") or absent_head,
        }

    def write(model: ModelConfig) -> Values:
        out = {"num_attention_heads": model.heads, "num_key_value_heads": model.kv_heads}
        follows = model.head_size * model.heads == model.dim
        return out if follows and not always_head else out | {"head_dim": model.head_size}

    return Rule(("num_attention_heads", "num_key_value_heads", "head_dim"), read, write)


def experts(
    counts: tuple[str, ...],
    absent: tuple[int, int],
    width: str = "",
    normalise: str = "",
    *,
    is_deepseek: bool = False,
) -> Rule:
    """The experts of each block.

    counts: names of their number; the first is written. absent: what counts if the number, or that
    of a token's experts, is missing. Without `width`, an expert is as wide as the feed-forward.
    Without `normalise`, the weights of a token's experts add up to 1. is_deepseek: sigmoids, a bias
    of the choice, shared experts, and blocks without experts at the beginning.
    """
    sigmoid = (SHARED, FIRST, SCALE) if is_deepseek else ()
    coefficient = () if is_deepseek else (BALANCE_LOSS,)

    def read(config: Config) -> Values:
        number_of = next((config[key] for key in counts if config.get(key) is not None), absent[0])
        found: Values = {"count": number_of, "top_k": config.get(TOP_K) or absent[1]}
        found["width"] = config[width] if width else 0
        found["normalise"] = bool(config.get(normalise)) if normalise else True
        if is_deepseek:
            scale = config.get(SCALE)
            found |= {"scores": "sigmoid", "choice_bias": True, "scale": scale or 1.0}
            found |= {"shared": config.get(SHARED) or 0, "first": config.get(FIRST) or 0}
        else:
            loss = config.get(BALANCE_LOSS)
            found["balance_loss"] = 0.001 if loss is None else loss
        return {"experts": found}

    def write(model: ModelConfig) -> Values:
        had = model.experts
        if had is None:
            return {}
        out: Values = {counts[0]: had.count, TOP_K: had.top_k}
        out |= {width or "intermediate_size": model.inner_dim}
        out |= {normalise: had.normalise} if normalise else {}
        if is_deepseek:
            return out | {SHARED: had.shared, FIRST: had.first, SCALE: had.scale}
        return out | {BALANCE_LOSS: had.balance_loss}

    named = (TOP_K, width, normalise, *sigmoid, *coefficient)
    return Rule((*counts, *(key for key in named if key)), read, write)


SHARED, FIRST, SCALE = "n_shared_experts", "first_k_dense_replace", "routed_scaling_factor"
TOP_K = "num_experts_per_tok"
BALANCE_LOSS = "router_aux_loss_coef"


def query_scale(absent: float) -> Rule:
    """Gemma 2 and 3: scores are divided by the root of `query_pre_attn_scalar`."""

    def read(config: Config) -> Values:
        return {"attention_scale": number(config, "query_pre_attn_scalar", absent) ** -0.5}

    def write(model: ModelConfig) -> Values:
        scale = model.attention_scale
        return {"query_pre_attn_scalar": round(scale**-2) if scale else model.head_size}

    return Rule(("query_pre_attn_scalar",), read, write)


def embedding_by_dim() -> Rule:
    """Gemma: embeddings are multiplied by the root of the model dim."""

    def read(config: Config) -> Values:
        return {"embedding_multiplier": number(config, "hidden_size") ** 0.5}

    return Rule((), read, lambda model: {})


def number(config: Config, key: str, absent: float | None = None) -> float:
    """A positive number. Raises KeyError if it is missing and nothing counts instead."""
    value = config.get(key)
    if value is None:
        if absent is None:
            raise KeyError(key)
        value = absent
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise NotSupportedError(f"{key} {value!r} is not a number above 0")
    return value


FULL, WINDOW = "full_attention", "sliding_attention"


def window_everywhere(absent: int | None, switch: str = "", without: tuple[str, ...] = ()) -> Rule:
    """Mistral, Phi 3: one window for all blocks. absent: their window if the key is missing.
    switch: a key that must be true for any window. without: keys that count only with a window,
    and are not supported with one."""

    def read(config: Config) -> Values:
        has_window = not switch or config.get(switch)
        for key in without:
            if has_window and config.get(key):
                raise NotSupportedError(f"{key} {config[key]!r} with a window is not supported")
        return {"window": (config.get("sliding_window", absent) or 0) if has_window else 0}

    def write(model: ModelConfig) -> Values:
        out: Values = {switch: bool(model.window)} if switch else {}
        return out | {"sliding_window": model.window or None}

    return Rule(("sliding_window", *((switch,) if switch else ()), *without), read, write)


def window_by_block(
    has_window: Callable[[Config, int], bool],
    *,
    absent: int | None = None,
    switch: str | None = None,
    also: tuple[str, ...] = (),
    write_also: Callable[[ModelConfig], Values] = lambda model: {},
) -> Rule:
    """`layer_types` says which blocks have the window. If it is absent, `has_window` does.

    absent: their window if the key is missing. switch: a key that must be true for any window.
    also: keys that `has_window` reads, written by `write_also`.
    """

    def read(config: Config) -> Values:
        window = config.get("sliding_window", absent) or 0
        if switch and not config.get(switch):
            window = 0
        layers = int(number(config, "num_hidden_layers"))
        types = config.get("layer_types")
        if types is None:
            near = [i for i in range(layers) if has_window(config, i)] if window else []
        else:
            # Raises NotSupportedError if `layer_types` does not name one of two kinds for each
            # block.
            if not isinstance(types, list) or len(types) != layers:
                count = len(types) if isinstance(types, list) else "no"
                raise NotSupportedError(f"layer_types has {count} entries for {layers} blocks")
            other = next((kind for kind in types if kind not in (FULL, WINDOW)), None)
            if other is not None:
                raise NotSupportedError(f"layer_types {other!r} is not supported")
            near = [i for i, kind in enumerate(types) if kind == WINDOW]
        if near and not window and not switch:
            raise NotSupportedError(f"layer_types has {WINDOW} but there is no sliding_window")
        return {"window": window, "window_layers": near} if near and window else {"window": 0}

    def write(model: ModelConfig) -> Values:
        near = set(model.windowed)
        out: Values = {switch: bool(near)} if switch else {}
        if switch and not near:
            return out | write_also(model)
        kinds = [WINDOW if i in near else FULL for i in range(model.layers)]
        return (
            out
            | {"sliding_window": model.window or None, "layer_types": kinds}
            | (write_also(model))
        )

    keys = ("sliding_window", "layer_types", *also, *((switch,) if switch else ()))
    return Rule(keys, read, write)


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
    absent_theta: float = 10_000.0, *, scalings: tuple[str, ...] = ALL_TYPES, partial: bool = False
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
