"""Rotary position embedding (Su et al. 2021, RoFormer, section 3.4), with Llama 3's scaling.

Element i and element i + h/2 of a head form a pair, turned by the angle position * frequency_i.
(The paper pairs neighbours. Halves are the convention of the public Llama and Qwen weights, so
imported and exported matrices need no permutation of rows.)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from holdfast.config.model import ModelConfig, RopeScaling

Rotary = tuple[Tensor, Tensor]
"""cos and sin, each [S, 1, h/2], or [B, S, 1, h/2] where positions differ between samples."""


def frequencies(model: ModelConfig) -> Tensor:
    """Radians per position of each pair -> [h/2], float64 on the CPU."""
    head = model.head_size
    exponents = torch.arange(0, head, 2, dtype=torch.float64, device="cpu") / head
    plain = model.rope_theta**-exponents
    return plain if model.rope_scaling is None else _scale_frequencies(plain, model.rope_scaling)


def _scale_frequencies(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1: long waves are slowed by `factor`, short ones kept, those between interpolated.

    A wave is long if fewer than `low_freq_factor` of it fit into the context that the model was
    first trained with. It is short if more than `high_freq_factor` fit.
    """
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    fitting = scaling.original_max_position * plain / (2 * math.pi)
    keep = ((fitting - low) / (high - low)).clamp(0.0, 1.0)
    return plain * (keep + (1.0 - keep) / scaling.factor)


class RotaryTable:
    """cos and sin of every angle up to the longest sequence seen, on one device.

    They are not buffers, because the table is derived from the config. It must not be lost when a
    model built on the meta device gets its memory. Nor must it be cast with the weights. Angles are
    computed in float64 and rounded once: to float64 for a float64 model, to float32 for every
    other.
    """

    def __init__(self, model: ModelConfig):
        self._model = model
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
            angles = torch.outer(positions, frequencies(self._model))[:, None, :]
            known = angles.cos().to(*key), angles.sin().to(*key)
            self._tables[key] = known
        return known


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Turn each pair of each head by its position's angle.  x: [B, S, H, h] -> [B, S, H, h]"""
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)
