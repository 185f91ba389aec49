"""4-bit weights of a frozen base: NF4 (Dettmers et al. 2023, section 3 and appendix E).

A weight is the nearest of 16 values, times the largest magnitude of its block of 64. Blocks lie in
rows, so a part of some rows has the codes that the complete matrix has there. Codes and scales are
those of bitsandbytes, without its second quantisation of the scales.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.config.sections.lora import NF4_BLOCK as BLOCK

VALUES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""Quantiles of the normal distribution, scaled to [-1, 1]."""


@dataclass(frozen=True)
class Nf4Weight:
    """A matrix [o, i] in 4 bits."""

    codes: Tensor  # uint8 [o * i / 2]: two codes each, the first in the upper half
    scales: Tensor  # float32 [o * i / 64]
    shape: tuple[int, int]
    dtype: torch.dtype  # of what is computed with

    @classmethod
    def of(cls, weight: Tensor, dtype: torch.dtype) -> Nf4Weight:
        """Round a matrix whose rows are multiples of 64."""
        rows, columns = weight.shape
        if columns % BLOCK:
            raise ValueError(f"a row of {columns} weights is no multiple of {BLOCK}")
        blocks = weight.float().reshape(-1, BLOCK)
        scales = blocks.abs().amax(1)
        table = torch.tensor(VALUES, device=weight.device)
        middles = (table[1:] + table[:-1]) / 2
        parts = blocks / torch.where(scales == 0, 1.0, scales)[:, None]
        codes = torch.bucketize(parts, middles).to(torch.uint8).view(-1, 2)
        return cls(codes[:, 0] << 4 | codes[:, 1], scales, (rows, columns), dtype)

    def dense(self) -> Tensor:
        """Return the rounded matrix [o, i]."""
        table = torch.tensor(VALUES, device=self.codes.device)
        codes = torch.stack((self.codes >> 4, self.codes & 15), dim=1).int()
        values = table[codes].view(-1, BLOCK) * self.scales[:, None]
        return values.view(self.shape).to(self.dtype)


class Nf4Linear(torch.autograd.Function):
    """x W^T + b with a frozen W, which both passes unpack again. Nothing of W is kept in full."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Nf4Weight, bias: Tensor | None) -> Tensor:
        ctx.weight = weight
        return F.linear(input, weight.dense(), bias)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None]:
        return slope @ ctx.weight.dense(), None, None


def rounded(weight: Tensor) -> Tensor:
    """Return what `Nf4Weight` makes of a matrix, in the matrix's dtype."""
    return Nf4Weight.of(weight, weight.dtype).dense()
