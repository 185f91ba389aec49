"""Block-wise 8-bit numbers (Dettmers et al., 2022, "8-bit Optimizers via Block-wise Quantization").

A block is `BLOCK` elements of one row. It has one scale, its largest magnitude. Each element is a
code of 8 bits, the nearest value of the dynamic map of section 1.3 times the scale. No layout cuts
a block, so the bits of a block depend on its elements alone.

Two rules differ from the paper. A second moment above 0 never becomes 0, because its root divides
the update. And a table has the code for the upper 19 bits of a float32. On a CPU, that is ten times
faster than a search.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.options.short_state.keys import BLOCK

_LOWER_BITS = 13
_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


def dynamic_map(*, signed: bool) -> tuple[float, ...]:
    """The 256 values of the dynamic map, rising from 0 or about -1 to 1.

    Seven decades, from 1e-6 to 1. Each decade has twice as many values as the one below it.
    """
    decades, found = 7, [0.0, 1.0]
    for decade in range(decades):
        count = 2 ** (decade if signed else decade + 1)
        width = 0.9 / count
        for index in range(count):
            value = (0.1 + (index + 0.5) * width) * 10.0 ** (decade - decades + 1)
            found += [value, -value] if signed else [value]
    return tuple(sorted(found))


class EightBitCode:
    """Packs float32 rows into codes and scales, and unpacks them. signed: for a first moment.

    values: of each code. codes: for each pattern of upper bits.
    """

    def __init__(self, device: torch.device, *, signed: bool) -> None:
        values = dynamic_map(signed=signed)
        self.values = torch.tensor(values, dtype=torch.float32, device=device)
        self.codes = _codes_of_upper_bits(values).to(device)

    def unpack(self, codes: Tensor, scales: Tensor) -> Tensor:
        """codes: [r, n] uint8, scales: [r, blocks] -> [r, n] float32"""
        found = self.values.index_select(0, codes.reshape(-1).int()).view(codes.shape)
        return _by_block(found).mul_(scales.unsqueeze(-1)).flatten(1)[:, : codes.shape[1]]

    def pack(self, values: Tensor, codes: Tensor, scales: Tensor) -> None:
        """Write the codes and scales of `values`, which are finite.

        values: [r, n] float32 -> codes: [r, n] uint8, scales: [r, blocks]
        """
        blocks = _by_block(values)
        torch.amax(blocks.abs(), dim=-1, out=scales)
        quotients = blocks / scales.clamp_min(_SMALLEST_NORMAL).unsqueeze(-1)
        upper = quotients.view(torch.int32).bitwise_right_shift_(_LOWER_BITS)
        upper.bitwise_and_(len(self.codes) - 1)
        found = self.codes.index_select(0, upper.view(-1)).view(len(values), -1)
        codes.copy_(found[:, : codes.shape[1]])


def _by_block(rows: Tensor) -> Tensor:
    """[r, n] -> [r, blocks, BLOCK], with zeros after the last element"""
    rest = -rows.shape[1] % BLOCK
    return (F.pad(rows, (0, rest)) if rest else rows).view(len(rows), -1, BLOCK)


def _codes_of_upper_bits(values: Sequence[float]) -> Tensor:
    """The code of the value nearest to the middle of all float32 with the same upper bits."""
    known = torch.tensor(values, dtype=torch.float64)
    upper = torch.arange(2 ** (32 - _LOWER_BITS), dtype=torch.int64)
    bits = (upper << _LOWER_BITS) + (1 << (_LOWER_BITS - 1))
    middles = bits.int().view(torch.float32).double().nan_to_num_(0.0)
    codes = torch.bucketize(middles, (known[1:] + known[:-1]) / 2)
    if values[0] == 0.0:
        codes.clamp_min_(1)
    zero = values.index(0.0)
    codes[0] = codes[len(codes) // 2] = zero  # of 0 and of -0
    return codes.to(torch.uint8)
