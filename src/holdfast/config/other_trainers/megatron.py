"""`args` of a checkpoint of Megatron as a run file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.config.other_trainers.translation import Translation

MODEL = {
    "num_layers": "layers",
    "hidden_size": "dim",
    "num_attention_heads": "heads",
    "kv_channels": "head_dim",
    "ffn_hidden_size": "ffn_dim",
    "padded_vocab_size": "vocab_size",
    "max_position_embeddings": "max_position",
    "qk_layernorm": "qk_norm",
}
TRAIN = {
    "seq_length": "data.sequence_length",
    "train_iters": "train.steps",
    "global_batch_size": "train.batch_size",
    "micro_batch_size": "train.microbatch_size",
    "clip_grad": "train.optimizer.clip_norm",
    "seed": "seed",
    "save_interval": "checkpoint.every_steps",
    "eval_interval": "train.evaluate.every",
}
OTHERS = {
    "swiglu": (True, "feed-forward blocks are gated here"),
    "normalization": ("RMSNorm", "norms are RMSNorm here"),
    "position_embedding_type": ("rope", "positions are rotary here"),
    "add_bias_linear": (False, "linear layers have no bias here"),
    "rotary_interleaved": (False, "rotary pairs are halves of a head here"),
    "rotary_percent": (1.0, "see model.rope_fraction"),
}
"""Settings of the model -> the value that a run has, and what to know of any other."""


def translate(args: Mapping[str, Any], settings: Mapping[str, Any]) -> Translation:
    """settings: keys of a run file that the checkpoint's optimizer and schedule say."""
    there = Translation("Megatron", args)
    there.values["model.preset"] = None
    for key, target in MODEL.items():
        there.take(key, f"model.{target}")
    groups = there.take("num_query_groups") or there.values.get("model.heads")
    there.values["model.kv_heads"] = groups
    there.number("rotary_base", "model.rope_theta")
    there.number("norm_epsilon", "model.norm_eps")
    untied = there.take("untie_embeddings_and_output_weights")
    there.values["model.tied_embeddings"] = untied is False
    if there.take("add_qkv_bias"):
        there.values["model.attention_bias"] = "qkv"
    for key, target in TRAIN.items():
        there.take(key, target)
    bf16, fp16 = there.take("bf16"), there.take("fp16")
    there.values["train.precision"] = "bf16" if bf16 else "fp16" if fp16 else "fp32"
    there.values |= settings
    for key, (plain, reason) in OTHERS.items():
        if key in args and there.take(key) not in (plain, None):
            there.leave(key, reason)
    rest = sorted(key for key in args if key not in there.translated | set(there.left_out))
    there.harmless |= {key for key in rest if args[key] in (None, False)}
    if named := [key for key in rest if key not in there.harmless]:
        there.notes.append(f"not read of args: {', '.join(named)}")
    return there
