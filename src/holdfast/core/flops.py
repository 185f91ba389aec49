"""Floating-point operations per token, by both conventions in use, and utilisation.

A matrix of n parameters costs a token 2n FLOPs forward and 4n backward: 6n. Attention adds scores
and mixing, each 2 * H*h * S forward per layer. With the backward that is 12 * L * H*h * S, if every
query is counted against all S keys. (PaLM: Chowdhery et al. 2022, appendix B.) A causal mask needs
only half of them. Conventions differ on counting the other half, which changes the quoted
utilisation by 5 to 20 %. So a number is never given without its convention's name.

    "full"    attention not halved: torchtitan's formula, and the PaLM paper's
    "causal"  attention halved: Megatron's and MaxText's

Both count every parameter but the embedding table (a lookup), and count the head, also when it is
tied to that table. Of experts they count those that compute a token. Recomputation never counts:
this is model FLOPs, not hardware's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from holdfast.core.sharding.parameters import count_idle_parameters, count_parameters
from holdfast.core.sharding.state_table import MIXED

if TYPE_CHECKING:  # the mover has no use for pydantic
    from holdfast.config.run import RunConfig
    from holdfast.config.sections.model import ModelConfig

Convention = Literal["full", "causal"]
CONVENTIONS: dict[Convention, str] = {
    "full": "6 N + 12 L H h S, attention not halved (torchtitan)",
    "causal": "6 N + 6 L H h S, causal attention halved (Megatron)",
}

TASK = "task"
FORMULAS: dict[str, str] = {
    "full": CONVENTIONS["full"],
    "causal": CONVENTIONS["causal"],
    TASK: "as the task's flops() says, for a weight of 1",
}
"""Of `run_flops_per_token`."""

# Dense peaks in FLOP/s of bf16 and fp16, which are alike. From the makers' data sheets (never the
# figures with 2:4 sparsity). A test compares them with `plan/hardware/devices.csv`.
_HALF_PEAKS: dict[str, float] = {
    "GB300": 2.5e15,
    "GB200": 2.5e15,
    "B300": 2.25e15,
    "B200": 2.25e15,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "MI300X": 1307e12,
    "MI325X": 1307e12,
    "MI355X": 2.5e15,
    "MI250X": 383e12,
    "L40S": 362e12,
}


def counted_parameters(model: ModelConfig) -> int:
    """N of the formulas: all parameters that compute a token, with the head even if tied.
    Rows of the head that belong to no token are not computed with."""
    head_rows = 0 if model.tied_embeddings else model.vocab_rows  # in the count already
    without_head = count_parameters(model, embeddings=False) - head_rows * model.dim
    without_head -= count_idle_parameters(model)
    return without_head + model.vocab_size * model.dim


def flops_per_token(model: ModelConfig, sequence: int, convention: Convention) -> float:
    """FLOPs of one training token (forward and backward) in samples of `sequence` tokens."""
    per_key = 12 if convention == "full" else 6
    keys: float = model.layers * sequence
    if near := sum(block < model.layers for block in model.windowed):
        within = min(model.window, sequence)
        # Of a window's keys only those before the text's begin are missing, not one half.
        halved = within if convention == "full" else within * (2 - within / sequence)
        keys = (model.layers - near) * sequence + near * halved
    attention = per_key * model.heads * model.head_size * keys
    return float(6 * counted_parameters(model) + attention)


def dense_peak(device: str, precision: str) -> float | None:
    """Return a device's peak dense FLOP/s by its reported name ("NVIDIA H100 80GB HBM3"). It is
    that of the run file's precision. None if no figure is known: then no utilisation is quoted. In
    fp8 only some products are in float8, so no one peak holds."""
    if precision not in MIXED or precision == "fp8":
        return None
    for name, peak in _HALF_PEAKS.items():
        if all(word.lower() in device.lower() for word in name.split()):
            return peak
    return None


def run_flops_per_token(config: RunConfig) -> dict[str, float]:
    """FLOPs of one training token by each convention. Those of a task are known if it says so. The
    formulas do not hold for a frozen base, nor for a step that counts pairs or rows."""
    if config.task.flops and not config.lora.rank:
        return {TASK: config.task.flops}
    if not config.trains_decoder or not config.model.vocab_size or config.objective.counts:
        return {}
    length = config.data.sequence_length
    return {str(name): flops_per_token(config.model, length, name) for name in CONVENTIONS}
