"""Context parallelism by hand: keys and values gathered by torch's collectives, under a mask, with
torch's DistributedDataParallel for the gradients, fused AdamW, clipping.

Each rank has a chunk near the head of every sample and one near its tail, as ours. torch's own
`context_parallel` has no kernel for a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.work import Bench, blocks_of, compiled
from holdfast.model.decoder import Decoder


class Gather(torch.autograd.Function):
    """[t, ...] -> [n * t, ...]"""

    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:
        part = part.contiguous()
        out = part.new_empty(dist.get_world_size() * part.shape[0], *part.shape[1:])
        dist.all_gather_into_tensor(out, part)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous()
        size = gradient.shape[0] // dist.get_world_size()
        out = gradient.new_empty(size, *gradient.shape[1:])
        dist.reduce_scatter_tensor(out, gradient)
        return out


class GatheredKeys:
    """Stands in place of a cache: gives attention the keys of all tokens."""

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.stack((key, value), 2).transpose(0, 1)  # [T, B, 2, K, h]
        gathered: Tensor = Gather.apply(both)  # type: ignore[no-untyped-call]
        return gathered[:, :, 0].transpose(0, 1), gathered[:, :, 1].transpose(0, 1)


class PartOfTokens(nn.Module):
    """The decoder, of the tokens at some places of a sample."""

    def __init__(self, decoder: Decoder, places: Tensor, everywhere: Tensor) -> None:
        super().__init__()
        self.decoder, self._places = decoder, places
        self._mask = (everywhere <= places[:, None])[None, None]
        self._caches = [GatheredKeys()] * len(blocks_of(decoder))

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: [B, T] -> logits [B, T, V]"""
        positions = self._places.expand_as(tokens)
        logits: Tensor = self.decoder(
            tokens, positions=positions, caches=self._caches, mask=self._mask
        )
        return logits


def run(bench: Bench) -> None:
    work = bench.work
    bench.join()
    chunks = torch.arange(work.sequence).chunk(2 * bench.world)
    parts = [torch.cat((chunks[rank], chunks[-1 - rank])) for rank in range(bench.world)]
    places = parts[bench.rank]
    decoder = compiled(work.decoder(), work)
    model = DistributedDataParallel(PartOfTokens(decoder, places, torch.cat(parts)))
    bench.train(model, work.adamw(model), places=places)
