"""The global gradient norm: one value for any rank that computes it and any cut of buffers.

A norm taken per chunk of a reduction would have other bits for each number of replicas. Here
the flat gradient buffer is read in fixed blocks of 4,096 elements. Inside a block squares are
summed in the buffer's own dtype; blocks are then added up in float64, in order. The flat layout
is a function of the model and of the sharding, so the value is too. Meshes with several shards
combine their sums of squares in shard order.

Two processors add the squares of a block in unlike orders. So a buffer that lies on the host comes
to the device that computes, in pieces. An accelerator's kernel has one order if it gets many
blocks, and another one for a few. So it gets 16 at least.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite, nan, sqrt

import torch
import torch.nn.functional as F
from torch import Tensor

NORM_BLOCK = 4096
_LEAST_BLOCKS = 16
_PIECE_BLOCKS = 4096  # 64 MiB in float32


def sum_of_squares(flat: Tensor, device: torch.device | None = None) -> Tensor:
    """The sum of squares of a flat buffer, as a float64 scalar on the CPU.

    flat: [n * 4096], padded with zeros. device: that computes; None: the buffer's own. Raises
    ValueError for another length.
    """
    if flat.numel() % NORM_BLOCK:
        raise ValueError(f"a buffer of {flat.numel()} elements is not whole blocks of {NORM_BLOCK}")
    if flat.numel() == 0:
        return torch.zeros((), dtype=torch.float64)
    blocks = flat.view(-1, NORM_BLOCK)
    if device is None or device.type == flat.device.type:
        norms = _norms(blocks)
    else:
        pieces = blocks.tensor_split(-(-len(blocks) // _PIECE_BLOCKS))
        norms = torch.cat([_norms(piece.to(device, non_blocking=True)) for piece in pieces])
    # A running sum on the CPU has one order; a parallel sum's depends on threads and device.
    return norms.cpu().double().square_().cumsum(0)[-1]


def total_of_squares(
    counted: Iterable[Tensor], rest: Iterable[Tensor], device: torch.device
) -> float:
    """The sum of squares of some buffers. It is NaN if something in the `rest` is not finite: no
    norm counts that, but no step may apply it."""
    if not all(isfinite(sum_of_squares(flat, device)) for flat in rest):
        return nan
    return sum(float(sum_of_squares(flat, device)) for flat in counted)


def _norms(blocks: Tensor) -> Tensor:
    """[n, 4096] -> [n]"""
    missing = 0 if blocks.is_cpu else _LEAST_BLOCKS - len(blocks)
    padded = F.pad(blocks, (0, 0, 0, missing)) if missing > 0 else blocks
    norms: Tensor = torch.linalg.vector_norm(padded, dim=1)
    return norms[: len(blocks)]


def combine_norms(squares: Sequence[float]) -> float:
    """The norm over all shards of one replica, from their sums of squares in shard order."""
    total = 0.0
    for value in squares:
        total += value
    return sqrt(total)


def clip_factor(norm: float, limit: float) -> float:
    """Return the factor of gradients that brings their norm to at most `limit`; 0 is no limit. As
    `torch.nn.utils.clip_grad_norm_` (Pascanu et al., 2013, algorithm 1), with its 1e-6.
    """
    return min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0
