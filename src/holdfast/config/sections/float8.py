"""What `train.precision: fp8` can compute, to the extent that the run file alone decides it.

The kernels take factors whose inner length and number of outputs are multiples of 16. The gradient
of a weight is a product over the tokens of a microbatch. Whether the device has such kernels is in
`launch/node/devices.py`.
"""

from __future__ import annotations

from math import gcd

from holdfast.config.sections.layout import DegreesConfig, LayoutConfig
from holdfast.config.sections.model import ModelConfig
from holdfast.config.sections.pipeline_schedules import SCHEDULE_KINDS
from holdfast.config.sections.train import TrainConfig

MULTIPLE = 16
"""Of each length of a float8 product."""


def find_impossible_float8(
    layout: LayoutConfig, model: ModelConfig, train: TrainConfig, length: int, trained: str
) -> str | None:
    """Return the sentence of the first violated rule, "... : use ..."; None if there is none.

    length: tokens of a sample. trained: the subject of a sentence if it is not the decoder.
    """
    if train.precision != "fp8":
        return None
    if trained:
        return (
            f"train.precision fp8 is for the built-in decoder, and {trained} has other layers: "
            "use train.precision bf16"
        )
    if model.experts is not None:
        return "train.precision fp8 has not been tried with model.experts: use train.precision bf16"
    for key, degrees in layout.kinds:
        for sentence in (
            _lengths(key, degrees, model),
            _tokens(key, degrees, train.microbatch_size, length),
            _shared_bias(key, degrees, model),
            _split_backward(key, degrees, layout.schedule),
        ):
            if sentence:
                return sentence
    return None


def _lengths(key: str, degrees: DegreesConfig, model: ModelConfig) -> str:
    """Check the weights of a block, as tp cuts them."""
    tp, head = degrees.tp, model.head_size
    lengths = {
        f"model.dim {model.dim}": model.dim,
        f"model.heads {model.heads} x head_dim {head}": model.heads * head // tp,
        f"model.kv_heads {model.kv_heads} x head_dim {head}": max(1, model.kv_heads // tp) * head,
        f"model.ffn_dim {model.ffn_dim}": model.ffn_dim // tp,
    }
    odd = next((words for words, n in lengths.items() if n % MULTIPLE), None)
    if odd is None:
        return ""
    part = f" / {key}.tp {tp}" if tp > 1 and not odd.startswith("model.dim") else ""
    return (
        f"train.precision fp8 needs lengths that are multiples of {MULTIPLE}, and {odd}{part} is "
        "none: use train.precision bf16"
    )


def _tokens(key: str, degrees: DegreesConfig, microbatch: int, length: int) -> str:
    """Check the tokens of a microbatch, as dp_shard and cp cut it. 0: chosen later."""
    part = length // degrees.cp
    tokens = microbatch // degrees.dp_shard * part
    if tokens % MULTIPLE == 0:
        return ""
    samples = MULTIPLE // gcd(MULTIPLE, part) * degrees.dp_shard
    unit = MULTIPLE * degrees.cp
    return (
        f"train.precision fp8 needs microbatches of a multiple of {MULTIPLE} tokens, and a rank of "
        f"{key} has {tokens}: use data.sequence_length {-(-length // unit) * unit}, or "
        f"train.microbatch_size {samples}"
    )


def _split_backward(key: str, degrees: DegreesConfig, schedule: str) -> str:
    """Check that no half of a layer's backward is left for later: torchao's cannot be."""
    if degrees.pp == 1 or not SCHEDULE_KINDS[schedule].splits_backward:
        return ""
    return (
        f"train.precision fp8 does not work with layout.schedule {schedule} and {key}.pp "
        f"{degrees.pp}: use layout.schedule 1f1b"
    )


def _shared_bias(key: str, degrees: DegreesConfig, model: ModelConfig) -> str:
    if degrees.tp == 1 or model.attention_bias != "qkvo":
        return ""
    return (
        f"train.precision fp8 does not work with {key}.tp {degrees.tp} and model.attention_bias "
        "qkvo: use train.precision bf16, or tp 1"
    )
