"""Rotary position embedding (Su et al. 2021, RoFormer, section 3.4), and its scalings.

Element i and element i + h/2 of a head form a pair, turned by the angle position * frequency_i.
(The paper pairs neighbours. Halves are the convention of the public Llama and Qwen weights, so
imported and exported matrices need no permutation of rows.)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from holdfast.config.sections.model import ModelConfig, RopeScaling

Rotary = tuple[Tensor, Tensor]
"""cos and sin, each [S, 1, h/2], or [B, S, 1, h/2] where positions differ between samples."""


def frequencies(model: ModelConfig, windowed: bool = False) -> Tensor:
    """Radians per position of each pair -> [r/2], float64 on the CPU. r: the part of a head that
    is turned. `windowed`: of the blocks with a base of their own."""
    size = model.rotary_size
    exponents = torch.arange(0, size, 2, dtype=torch.float64, device="cpu") / size
    if windowed:
        return model.window_rope_theta**-exponents
    plain = model.rope_theta**-exponents
    scaling = model.rope_scaling
    if scaling is None:
        return plain
    if scaling.type == "linear":
        return plain / scaling.factor
    if scaling.type == "yarn":
        return _yarn(plain, scaling, model.rope_theta)
    # Llama 3.1: long waves are slowed by `factor`, short ones kept, those between interpolated. A
    # wave is long if fewer than `low_freq_factor` of it fit into the context that the model was
    # first trained with. It is short if more than `high_freq_factor` fit.
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    fitting = scaling.original_max_position * plain / (2 * math.pi)
    keep = ((fitting - low) / (high - low)).clamp(0.0, 1.0)
    return plain * (keep + (1.0 - keep) / scaling.factor)


def _yarn(plain: Tensor, scaling: RopeScaling, theta: float) -> Tensor:
    """YaRN (Peng et al. 2023, section 3.2): a ramp over the pairs, from kept to slowed.

    It begins at the pair that turns `beta_fast` times in the original context. It ends at the pair
    that turns `beta_slow` times.
    """
    size = 2 * len(plain)

    def pair_with_turns(turns: float) -> float:
        wave = scaling.original_max_position / (turns * 2 * math.pi)
        return size * math.log(wave) / (2 * math.log(theta))

    low, high = pair_with_turns(scaling.beta_fast), pair_with_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    width = high - low if high != low else 0.001
    slowed = ((torch.arange(len(plain), dtype=torch.float64) - low) / width).clamp(0.0, 1.0)
    return plain * ((1.0 - slowed) + slowed / scaling.factor)


def amplitude(model: ModelConfig) -> float:
    """Factor of cos and sin, with which YaRN keeps the scores' spread over a longer context."""
    scaling = model.rope_scaling
    if scaling is None or scaling.type != "yarn":
        return 1.0
    if scaling.attention_factor:
        return scaling.attention_factor
    return 1.0 if scaling.factor <= 1 else 0.1 * math.log(scaling.factor) + 1.0


class RotaryTable:
    """cos and sin of every angle up to the longest sequence seen, on one device.

    They are not buffers, because the table is derived from the config. It must not be lost when a
    model built on the meta device gets its memory. Nor must it be cast with the weights. Angles are
    computed in float64 and rounded once: to float64 for a float64 model, to float32 for every
    other. windowed: of the blocks that attend within a window.
    """

    def __init__(self, model: ModelConfig, windowed: bool = False):
        self._model, self._windowed = model, windowed
        self._tables: dict[tuple[torch.device, torch.dtype], Rotary] = {}

    def __call__(self, rows: int, positions: Tensor | None, like: Tensor) -> Rotary:
        """Rows 0 to rows-1; or those of `positions` [B, S], all below `rows`."""
        cos, sin = self._table(rows, like)
        if positions is None:
            return cos[:rows], sin[:rows]
        return cos[positions], sin[positions]

    def _table(self, rows: int, like: Tensor) -> Rotary:
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        key = (like.device, dtype)
        known = self._tables.get(key)
        if known is None or known[0].shape[0] < rows:
            positions = torch.arange(rows, dtype=torch.float64, device="cpu")
            turns = frequencies(self._model, self._windowed)
            angles = torch.outer(positions, turns)[:, None, :]
            scale = 1.0 if self._windowed else amplitude(self._model)
            cos, sin = angles.cos(), angles.sin()
            if scale != 1.0:
                cos, sin = cos * scale, sin * scale
            known = cos.to(*key), sin.to(*key)
            self._tables[key] = known
        return known


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Turn each pair of each head by its position's angle.  x: [B, S, H, h] -> [B, S, H, h]
    What is beyond the table's pairs stays as it is."""
    cos, sin = rotary
    size = 2 * cos.shape[-1]
    if size < x.shape[-1]:
        return torch.cat((rotate(x[..., :size], rotary), x[..., size:]), dim=-1)
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)
