"""Attention of one rank's queries to the keys of all ranks along `cp`.

    gathered   keys and values of all ranks are gathered, in forward and in backward again. Their
               gradients are reduced and scattered (Llama 3, section 3.3.2).
    ring       keys and values travel from rank to rank, and partial results are merged. In the
               backward their gradients travel with them (Liu et al. 2023, arXiv 2310.01889).

A rank keeps its own queries, keys, values and result between the two passes, as without `cp`.

Shapes: B batch, T tokens of a rank, S of all ranks, H query heads, K key/value heads, h head dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from holdfast.parallel.axes.context_kernels import Keys, MergedAttention, PartialAttention
from holdfast.parallel.axes.context_parts import TokenRelations, all_chunks, chunks_of, find_parts
from holdfast.parallel.comm.collectives import Collectives


class SpreadAttention(NamedTuple):
    """How a rank computes attention of a microbatch's tokens."""

    relations: TokenRelations
    collectives: Collectives
    kernel: PartialAttention
    scale: float

    def parts(
        self, chunks: Sequence[int], device: torch.device
    ) -> Iterator[tuple[slice, slice, Tensor | None, bool]]:
        """Yield (queries of this rank, keys that they see, mask, is causal). There is a mask if
        they see a part of these keys. chunks: of all keys, in their order."""
        size, mine = self.relations.size, chunks_of(self.collectives.rank, self.collectives.size)
        for query, first, last, sight in find_parts(mine, chunks, self.relations.look):
            rows = slice(query * size, (query + 1) * size)
            keys = slice(first * size, (last + 1) * size)
            mask = None
            if sight == "mask":
                mask = self.relations.mask(mine[query], chunks[first], device)
            yield rows, keys, mask, sight == "causal"

    def gathered(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q: [B, T, H, h]; k, v: [B, T, K, h] -> [B, T, H, h]"""
        return _Gathered.apply(q, k, v, self)  # type: ignore[no-any-return, no-untyped-call]

    def ring(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q: [B, T, H, h]; k, v: [B, T, K, h] -> [B, T, H, h]"""
        return _Ring.apply(q, k, v, self)  # type: ignore[no-any-return, no-untyped-call]


class _Backward(NamedTuple):
    """What the backward of every set of keys needs: [B, H, T, h], and logarithms [B, H, T]."""

    g: Tensor
    q: Tensor
    merged: tuple[Tensor, Tensor]
    dq: Tensor


def _attend(
    how: SpreadAttention, merged: MergedAttention, q: Tensor, kv: Tensor, chunks: Sequence[int]
) -> None:
    """Merge in what the queries see of some keys.  q: [B, T, H, h]; kv: [2, B, M, K, h]

    chunks: of the keys, in their order.
    """
    k, v = kv.transpose(2, 3)
    for rows, keys, mask, is_causal in how.parts(chunks, q.device):
        seen = Keys(k[:, :, keys], v[:, :, keys], mask, is_causal, how.scale)
        merged.add(rows, *how.kernel.forward(q.transpose(1, 2)[:, :, rows], seen))


def _attend_backward(
    how: SpreadAttention, given: _Backward, kv: Tensor, chunks: Sequence[int]
) -> Tensor:
    """Add to the gradient of the queries, and return that of these keys and values.
    kv: [2, B, M, K, h] -> [2, B, M, K, h], in at least float32"""
    k, v = kv.transpose(2, 3)
    out, logs = given.merged
    gradient = torch.zeros_like(kv, dtype=logs.dtype)
    dk, dv = gradient.transpose(2, 3)
    for rows, keys, mask, is_causal in how.parts(chunks, kv.device):
        seen = Keys(k[:, :, keys], v[:, :, keys], mask, is_causal, how.scale)
        result = out[:, :, rows], logs[:, :, rows]
        found = how.kernel.backward(given.g[:, :, rows], given.q[:, :, rows], seen, result)
        totals = given.dq[:, :, rows], dk[:, :, keys], dv[:, :, keys]
        for total, more in zip(totals, found, strict=True):
            total.add_(more)
    return gradient


def _finish(
    ctx: Any, how: SpreadAttention, q: Tensor, k: Tensor, v: Tensor, merged: MergedAttention
) -> Tensor:
    """Note what the backward needs, and return the result."""
    out = merged.out.transpose(1, 2).to(q.dtype)
    ctx.save_for_backward(q, k, v, out, merged.logs)
    ctx.how = how
    return out


def _begin_backward(ctx: Any, g: Tensor) -> tuple[SpreadAttention, _Backward, Tensor]:
    """Return what `_finish` noted; the keys and values come as [2, B, T, K, h]."""
    q, k, v, out, logs = ctx.saved_tensors
    dq = torch.zeros_like(q, dtype=logs.dtype)
    heads_first = (x.transpose(1, 2) for x in (g, q, out, dq))
    g, q, out, dq = heads_first
    return ctx.how, _Backward(g, q, (out, logs), dq), torch.stack((k, v))


def _gradients(given: _Backward, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
    """gradient: of keys and values"""
    dtype = given.q.dtype
    dk, dv = gradient.to(dtype)
    return given.dq.transpose(1, 2).to(dtype), dk, dv, None


class _Gathered(torch.autograd.Function):
    """All keys at once, in the order of their tokens."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, how: SpreadAttention) -> Tensor:
        merged, every = MergedAttention(q), range(2 * how.collectives.size)
        _attend(how, merged, q, _gather(how.collectives, torch.stack((k, v))), every)
        return _finish(ctx, how, q, k, v, merged)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        how, given, kv = _begin_backward(ctx, g)
        every = range(2 * how.collectives.size)
        gradient = _attend_backward(how, given, _gather(how.collectives, kv), every)
        return _gradients(given, _scatter(how.collectives, gradient.to(kv.dtype)))


def _gather(collectives: Collectives, kv: Tensor) -> Tensor:
    """[2, B, T, K, h] -> [2, B, S, K, h], in the order of tokens"""
    parts = collectives.all_gather(kv).view(-1, 2, *kv.shape[1:])  # [n, 2, B, T, K, h]
    chunks = [half for part in parts for half in part.chunk(2, 2)]
    order = all_chunks(collectives.size)
    return torch.cat([chunks[order.index(chunk)] for chunk in range(len(chunks))], 2)


def _scatter(collectives: Collectives, gradient: Tensor) -> Tensor:
    """Add up the ranks' gradients.  [2, B, S, K, h] -> this rank's part [2, B, T, K, h]"""
    ranks = collectives.size
    chunks = gradient.chunk(2 * ranks, 2)
    parts = [torch.cat([chunks[c] for c in chunks_of(rank, ranks)], 2) for rank in range(ranks)]
    return collectives.reduce_scatter(torch.cat(parts))


class _Ring(torch.autograd.Function):
    """One rank's keys at a time. While a rank computes with some, the next ones are on their way.

    The gradient of a rank's keys begins at the next rank, and ends at home, where the rank adds
    what it found itself.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, how: SpreadAttention) -> Tensor:
        merged, kv = MergedAttention(q), torch.stack((k, v))
        rank, ranks = how.collectives.rank, how.collectives.size
        for step in range(ranks):
            coming = how.collectives.rotate(kv) if step + 1 < ranks else None
            _attend(how, merged, q, kv, chunks_of((rank - step) % ranks, ranks))
            if coming is not None:
                kv = coming.wait()
        return _finish(ctx, how, q, k, v, merged)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        how, given, kv = _begin_backward(ctx, g)
        rank, ranks = how.collectives.rank, how.collectives.size
        own = travelling = None
        for step in range(ranks):
            coming = how.collectives.rotate(kv) if step + 1 < ranks else None
            gradient = _attend_backward(how, given, kv, chunks_of((rank - step) % ranks, ranks))
            if own is None:
                own = gradient
            else:
                if travelling is not None:
                    gradient += travelling.wait()
                travelling = how.collectives.rotate(gradient.to(kv.dtype))
            if coming is not None:
                kv = coming.wait()
        assert own is not None
        assert travelling is not None
        return _gradients(given, own + travelling.wait())
