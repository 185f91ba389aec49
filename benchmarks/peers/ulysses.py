"""Ulysses by hand: all_to_all_single swaps tokens and heads around torch's fused attention, with
torch's DistributedDataParallel for the gradients, fused AdamW, clipping.

Each rank has one contiguous part of every sample, as DeepSpeed-Ulysses has.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.work import Bench, blocks_of, compiled
from holdfast.model.rotary import Rotary, rotate


class Swap(torch.autograd.Function):
    """The i-th part to rank i.  [n, ...] -> [n, ...]"""

    @staticmethod
    def forward(ctx: Any, parts: Tensor) -> Tensor:
        out = torch.empty_like(parts)
        dist.all_to_all_single(out, parts)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous()
        out = torch.empty_like(gradient)
        dist.all_to_all_single(out, gradient)
        return out


class SwappedAttention(nn.Module):
    """Attention of some heads to all tokens. Parameters keep their names."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = original.q, original.k, original.v, original.o
        self.head, self.grouped = original.head, original.grouped
        self.world = dist.get_world_size()

    def forward(self, x: Tensor, rotary: Rotary, mask: object, cache: object = None) -> Tensor:
        """x: [B, T, D]"""
        batch, length, n = *x.shape[:2], self.world
        q, k, v = (each(x).view(batch, length, -1, self.head) for each in (self.q, self.k, self.v))
        q, k = rotate(q, rotary), rotate(k, rotary)
        by_rank = [heads.unflatten(2, (n, -1)) for heads in (q, k, v)]  # [B, T, n, H / n, h]
        heads = [each.shape[3] for each in by_rank]
        parts = torch.cat(by_rank, 3).permute(2, 0, 3, 1, 4).contiguous()
        got: Tensor = Swap.apply(parts)  # type: ignore[no-untyped-call]
        q, k, v = got.permute(1, 2, 0, 3, 4).flatten(2, 3).split(heads, 1)  # [B, H / n, S, h]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        parts = mixed.unflatten(2, (n, length)).permute(2, 0, 3, 1, 4).contiguous()
        back: Tensor = Swap.apply(parts)  # type: ignore[no-untyped-call]
        out: Tensor = self.o(back.permute(1, 2, 0, 3, 4).flatten(2))
        return out


class PartOfTokens(nn.Module):
    """The decoder, of this rank's tokens."""

    def __init__(self, decoder: nn.Module, places: Tensor) -> None:
        super().__init__()
        self.decoder, self._places = decoder, places

    def forward(self, tokens: Tensor) -> Any:
        """tokens: [B, T] -> logits [B, T, V]"""
        return self.decoder(tokens, positions=self._places.expand_as(tokens))


def run(bench: Bench) -> None:
    work = bench.work
    bench.join()
    places = torch.arange(work.sequence).chunk(bench.world)[bench.rank]
    decoder = work.decoder()
    blocks: list[Any] = blocks_of(decoder)
    for block in blocks:
        block.attention = SwappedAttention(block.attention)
    model = DistributedDataParallel(PartOfTokens(compiled(decoder, work), places))
    bench.train(model, work.adamw(model), places=places)
