"""`config.json`: our decoder's shape in Hugging Face's words, and back.

It is written in the form of the models' public repositories (`rope_theta` and `rope_scaling` on
top), which every release of `transformers` reads. The form of transformers 5 (`rope_parameters`) is
read too. A setting is refused if it makes their model compute something that the decoder cannot.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from holdfast.config.model import ModelConfig, RopeScaling
from holdfast.errors import UserError

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# Keys that must be absent or have one of these values, for the decoder to be the same function.
_REQUIRED_VALUES: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "quantization_config": (None,),
    "partial_rotary_factor": (1.0, None),
}


class ModelFolderError(UserError):
    """A folder in Hugging Face form cannot be read or written."""


def to_their_config(model: ModelConfig) -> dict[str, Any]:
    """config.json without token ids. Raises ModelFolderError if no architecture has this shape."""
    if model.qk_norm != (model.family == "qwen3"):
        raise ModelFolderError(
            f"family {model.family} {'has' if model.family == 'qwen3' else 'has no'} QK norm, "
            f"but qk_norm is {str(model.qk_norm).lower()}",
            where="model.family",
            remedy=f"use family {'qwen3' if model.qk_norm else 'llama'}",
        )
    scaling = model.rope_scaling
    return {
        "architectures": [_ARCHITECTURES[model.family]],
        "model_type": model.family,
        "vocab_size": model.vocab_size,
        "hidden_size": model.dim,
        "intermediate_size": model.ffn_dim,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": model.max_position,
        "initializer_range": model.init_std,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tied_embeddings,
        "rope_theta": model.rope_theta,
        "rope_scaling": None if scaling is None else _to_their_scaling(scaling),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_cache": True,
    } | ({"mlp_bias": False} if model.family == "llama" else {"use_sliding_window": False})


def to_their_generation_config(ids: dict[str, int | None]) -> dict[str, Any]:
    """generation_config.json: token ids, and sampling as `generate.py` does it by default."""
    return {**{key: value for key, value in ids.items() if value is not None}, "do_sample": True}


def from_their_config(config: dict[str, Any], where: str) -> ModelConfig:
    """config.json -> ModelConfig. Raises ModelFolderError for what the decoder cannot compute."""
    family = config.get("model_type")
    if family not in _ARCHITECTURES:
        raise ModelFolderError(
            f"model_type {family!r} is not supported",
            where=where,
            remedy=f"use one of {', '.join(_ARCHITECTURES)}",
        )
    for key, allowed in _REQUIRED_VALUES.items():
        if key in config and config[key] not in allowed:
            raise ModelFolderError(f"{key} {config[key]!r} is not supported", where=where)
    rope = config.get("rope_parameters") or {}
    scaling = rope or config.get("rope_scaling")
    heads = config.get("num_attention_heads", 0)
    try:
        return ModelConfig.model_validate(
            {
                "preset": None,
                "family": family,
                "layers": config["num_hidden_layers"],
                "dim": config["hidden_size"],
                "heads": heads,
                "kv_heads": config.get("num_key_value_heads") or heads,
                "head_dim": config.get("head_dim") or 0,
                "ffn_dim": config["intermediate_size"],
                "vocab_size": config["vocab_size"],
                "max_position": config["max_position_embeddings"],
                "rope_theta": rope.get("rope_theta") or config.get("rope_theta") or 10_000.0,
                "rope_scaling": _from_their_scaling(scaling, where),
                "norm_eps": config["rms_norm_eps"],
                "qk_norm": family == "qwen3",
                "tied_embeddings": bool(config.get("tie_word_embeddings", False)),
                "init_std": config.get("initializer_range") or 0.02,
            }
        )
    except KeyError as error:
        raise ModelFolderError(f"key {error} is missing", where=where) from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ModelFolderError(f"{place} {first['msg']}".strip(), where=where) from error


def _to_their_scaling(scaling: RopeScaling) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_position,
    }


def _from_their_scaling(scaling: dict[str, Any] | None, where: str) -> RopeScaling | None:
    kind = "default" if not scaling else scaling.get("rope_type") or scaling.get("type")
    if not scaling or kind == "default":
        return None
    if kind != "llama3":
        raise ModelFolderError(
            f"rope scaling of type {kind!r} is not supported",
            where=where,
            remedy="only llama3's is",
        )
    return RopeScaling(
        factor=scaling["factor"],
        low_freq_factor=scaling["low_freq_factor"],
        high_freq_factor=scaling["high_freq_factor"],
        original_max_position=scaling["original_max_position_embeddings"],
    )
