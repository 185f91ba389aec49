"""What `train.precision: fp8` can compute, to the extent that the run file alone decides it.

The kernels take factors whose inner length and number of outputs are multiples of 16. The gradient
of a weight is a product over the tokens of a microbatch. Whether the device has such kernels is in
`launch/node/devices.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
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
    refusals = (
        sentence
        for key, degrees in layout.kinds
        for sentence in _refusals(key, degrees, layout.schedule, model, train, length)
    )
    return next(refusals, None)


def _refusals(
    key: str,
    degrees: DegreesConfig,
    schedule: str,
    model: ModelConfig,
    train: TrainConfig,
    length: int,
) -> Iterator[str]:
    tp, head = degrees.tp, model.head_size
    lengths = {  # of the weights of a block, as tp cuts them
        f"model.dim {model.dim}": model.dim,
        f"model.heads {model.heads} x head_dim {head}": model.heads * head // tp,
        f"model.kv_heads {model.kv_heads} x head_dim {head}": max(1, model.kv_heads // tp) * head,
        f"model.ffn_dim {model.ffn_dim}": model.ffn_dim // tp,
    }
    for words, number in lengths.items():
        part = f" / {key}.tp {tp}" if tp > 1 and not words.startswith("model.dim") else ""
        if number % MULTIPLE:
            yield (
                f"train.precision fp8 needs lengths that are multiples of {MULTIPLE}, and "
                f"{words}{part} is none: use train.precision bf16"
            )
    part_length = length // degrees.cp
    tokens = train.microbatch_size // degrees.dp_shard * part_length  # 0: chosen later
    if tokens % MULTIPLE:
        samples = MULTIPLE // gcd(MULTIPLE, part_length) * degrees.dp_shard
        unit = MULTIPLE * degrees.cp
        yield (
            f"train.precision fp8 needs microbatches of a multiple of {MULTIPLE} tokens, and a "
            f"rank of {key} has {tokens}: use data.sequence_length {-(-length // unit) * unit}, or "
            f"train.microbatch_size {samples}"
        )
    if tp > 1 and model.attention_bias == "qkvo":
        yield (
            f"train.precision fp8 does not work with {key}.tp {tp} and model.attention_bias "
            "qkvo: use train.precision bf16, or tp 1"
        )
    if degrees.pp > 1 and SCHEDULE_KINDS[schedule].splits_backward:  # which torchao's cannot be
        yield (
            f"train.precision fp8 does not work with layout.schedule {schedule} and {key}.pp "
            f"{degrees.pp}: use layout.schedule 1f1b"
        )
