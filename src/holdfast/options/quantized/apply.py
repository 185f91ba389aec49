"""Codes of few bits for what shards send each other (ZeRO++: Wang et al., 2023).

Section 3.1 of the paper sends parameters as 8-bit codes, and section 3.3 sends gradients as 4-bit
codes, both in blocks with a scale each. A block is `BLOCK` elements of one parameter. Its scale is
its largest magnitude over the largest code, so no code is clipped. Elements take the nearest code,
and the halves between two codes the even one.

A gradient is quantised once, by the shard that computed it. Its owner adds the parts in float32,
in the order of the shards. The paper's reduction takes two such steps, because its shards lie on
several nodes.

If a block has a number that is not finite, all of it arrives as NaN. So the check for such numbers
finds it, under the parameter's name.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.config.sections.layout import LayoutConfig
from holdfast.options.protocols import Apply
from holdfast.parallel.axes.fsdp import ShardCodes

BLOCK = 128
"""Elements that share a scale."""
_SCALE_BYTES = 4  # float32
WEIGHT_BITS, GRADIENT_BITS = 8, 4


class BlockCode:
    """Packs rows of some parameters' parts into bytes, and unpacks them.

    sizes: elements of each part in a row. bits: of a code, 8 or 4. `row_bytes`: of a packed row,
    its scales first.
    """

    def __init__(self, sizes: Sequence[int], bits: int) -> None:
        self._sizes, self._bits = list(sizes), bits
        self._blocks = [-(-size // BLOCK) for size in sizes]
        self._largest = 2 ** (bits - 1) - 1
        codes = sum(self._code_bytes(size) for size in sizes)
        self._scale_bytes = _SCALE_BYTES * sum(self._blocks)
        self.row_bytes = self._scale_bytes + codes + -codes % _SCALE_BYTES

    def pack(self, rows: Tensor) -> Tensor:
        """rows: [r, sum of sizes], floating -> [r, row_bytes] uint8"""
        packed = torch.zeros(len(rows), self.row_bytes, dtype=torch.uint8, device=rows.device)
        scales = self._scales(packed)
        block, at = 0, self._scale_bytes
        for part, count in zip(torch.split(rows, self._sizes, dim=1), self._blocks, strict=True):
            size = part.shape[1]
            blocks = F.pad(part.float(), (0, -size % BLOCK)).view(len(rows), count, BLOCK)
            scale = blocks.abs().amax(dim=-1).div_(self._largest)
            scales[:, block : block + count] = scale
            blocks /= torch.where(scale == 0, 1.0, scale).unsqueeze(-1)
            codes = blocks.round_().nan_to_num_(0.0).flatten(1)[:, :size].to(torch.int8)
            room = packed[:, at : at + self._code_bytes(size)]
            room.copy_(codes.view(torch.uint8) if self._bits == 8 else _joined(codes))
            block, at = block + count, at + room.shape[1]
        return packed

    def unpack(self, packed: Tensor, out: Tensor) -> None:
        """packed: [r, row_bytes] uint8 -> out: [r, sum of sizes], floating"""
        scales = self._scales(packed)
        block, at = 0, self._scale_bytes
        for part, count in zip(torch.split(out, self._sizes, dim=1), self._blocks, strict=True):
            size = part.shape[1]
            room = packed[:, at : at + self._code_bytes(size)]
            codes = room.view(torch.int8) if self._bits == 8 else _split(room)[:, :size]
            blocks = F.pad(codes.float(), (0, -size % BLOCK)).view(len(out), count, BLOCK)
            blocks *= scales[:, block : block + count].unsqueeze(-1)
            part.copy_(blocks.flatten(1)[:, :size])
            block, at = block + count, at + room.shape[1]

    def _scales(self, packed: Tensor) -> Tensor:
        """[r, row_bytes] uint8 -> [r, blocks] float32, a view"""
        return packed[:, : self._scale_bytes].view(torch.float32)

    def _code_bytes(self, size: int) -> int:
        return -(-size * self._bits // 8)


def _joined(codes: Tensor) -> Tensor:
    """[r, n] int8 from -7 to 7 -> [r, ceil(n / 2)] uint8"""
    pairs = F.pad(codes + 8, (0, codes.shape[1] % 2)).to(torch.uint8).view(len(codes), -1, 2)
    return pairs[..., 0] | pairs[..., 1] << 4


def _split(joined: Tensor) -> Tensor:
    """The reverse, with one element more where n is odd."""
    pairs = torch.stack((joined & 15, joined >> 4), dim=-1)
    return pairs.flatten(1).to(torch.int8) - 8


def shard_codes(layout: LayoutConfig) -> ShardCodes:
    """Return the codes of parameters and of gradients."""
    weights, gradients = (partial(BlockCode, bits=n) for n in (WEIGHT_BITS, GRADIENT_BITS))
    sent = layout.quantized
    return weights if sent != "gradients" else None, gradients if sent != "weights" else None


APPLY = Apply(shard_codes=shard_codes)
