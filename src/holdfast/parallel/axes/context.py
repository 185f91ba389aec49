"""The `cp` axis: each of n ranks has S / n tokens of every sample.

Operations on single tokens need nothing. Attention needs the keys of all tokens, and
`layout.cp_method` says how a rank gets at them:

    allgather     keys and values are gathered (`context_attention.py`)
    ring          keys and values travel from rank to rank (`context_attention.py`)
    ulysses       tokens and heads are swapped: a rank computes some heads of all tokens (Jacobs et
                  al. 2023, arXiv 2309.14509)
    ulysses-ring  both: groups of n / r ranks swap, and r such groups are a ring, whose ranks hold
                  equal heads (Fang and Zhao 2024, arXiv 2405.07719)

A rank has two chunks of a sample (`context_parts.py`). Positions and documents are those of the
complete sample, so every stage of a pipeline is given complete tokens. Parameters are complete on
every rank. Their gradients are parts, which the cells of `core/sharding/reduction_cells.py` add.
The loss is summed over the ranks, so that each of them knows it.

What a rank sends for one microbatch of B samples and each block, in elements, forward and backward.
The rank has H query and K key/value heads of size h.

    allgather, ring    6 (n - 1) / n * B S K h
    ulysses            4 (n - 1) / n^2 * B S (H + K) h
    ulysses-ring       with u = n / r: 4 (u - 1) / (u n) * B S (H + K) h
                       and 6 (r - 1) / n * B S K h

If blocks are run again in the backward, the forward's part of this is sent once more.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from holdfast.model.decoder import AttentionContext, Decoder, Mask
from holdfast.model.documents import AttentionPlan, Mix, document_positions
from holdfast.parallel.axes.context_attention import SpreadAttention
from holdfast.parallel.axes.context_kernels import choose_kernel
from holdfast.parallel.axes.context_parts import TokenRelations, all_chunks, chunks_of
from holdfast.parallel.comm.collectives import Collectives
from holdfast.parallel.comm.comm_stats import TrafficCounter

ContextMethod = Literal["allgather", "ring", "ulysses", "ulysses-ring"]


class ContextParallel:
    """The ranks over which one decoder's tokens are spread.

    ring: ranks of a ring under ulysses-ring. swap: the ranks that swap tokens and heads. rest:
    those whose keys a rank needs after that. Either is None if it is this rank alone.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        method: ContextMethod,
        ring: int,
        traffic: TrafficCounter | None = None,
    ) -> None:
        self.whole = Collectives(group, traffic, "cp")
        self.rank, self.ranks = self.whole.rank, self.whole.size
        self.is_gathered = method == "allgather"
        ring = {"ulysses": 1, "ulysses-ring": ring}.get(method, self.ranks)
        swapping = self.ranks // ring
        row, column = divmod(self.rank, swapping)
        rows = range(row * swapping, (row + 1) * swapping)
        columns = range(column, self.ranks, swapping)
        self.swap = Collectives(group, traffic, "cp", rows) if swapping > 1 else None
        self.rest = Collectives(group, traffic, "cp", columns) if ring > 1 else None
        self.attend = _attend

    def exclude_from_compilation(self) -> None:
        """Sends and receives are not for the compiler, so a compiled block ends before attention
        and begins after it."""
        aside: Any = torch.compiler.disable
        self.attend = aside(_attend)


class TokenShare:
    """This rank's tokens and targets of a microbatch, [B, S / n] each, and where they stand."""

    def __init__(
        self, context: ContextParallel, tokens: Tensor, targets: Tensor, documents: Tensor | None
    ) -> None:
        self._context, self._all, self._documents = context, tokens, documents
        self.tokens, self.targets = self._own(tokens), self._own(targets)

    def attention_context(
        self, decoder: Decoder, like: Tensor, samples: slice = slice(None)
    ) -> AttentionContext:
        """As `Decoder.attention_context`, for this rank's tokens of some samples."""
        everything = self._all[samples]
        length, documents = everything.shape[1], self._documents
        if documents is not None:
            documents = documents[samples]
        known = everything.new_zeros(1, length) if documents is None else documents
        positions = self._own(document_positions(known))
        far = near = decoder.rotary(length, positions, like)
        if decoder.window_rotary is not decoder.rotary:
            near = decoder.window_rotary(length, positions, like)
        seen: tuple[Mask | TokenRelations, Mask | TokenRelations]
        if self._context.rest is None:
            whole = decoder.attention_context(everything, like, documents)
            seen = whole.mask, whole.window_mask
        else:
            tokens = TokenRelations(length // (2 * self._context.rest.size), documents)
            seen = tokens, tokens.within(decoder.config.window)
        softcap = decoder.config.attention_softcap
        every, window = (SpreadTokens(self._context, one, softcap) for one in seen)
        return AttentionContext(far, every, near, window)

    def _own(self, x: Tensor) -> Tensor:
        """[B, S] -> [B, S / n]"""
        chunks = x.chunk(2 * self._context.ranks, 1)
        mine = chunks_of(self._context.rank, self._context.ranks)
        return torch.cat([chunks[chunk] for chunk in mine], 1)


class SpreadTokens(AttentionPlan):
    """Attention of this rank's part of a microbatch's tokens.

    seen: which tokens see which, by the chunks of the ranks that remain after the swap; the mask of
    all tokens if none do.
    """

    def __init__(
        self, context: ContextParallel, seen: Mask | TokenRelations, softcap: float
    ) -> None:
        self.context, self._seen, self._softcap = context, seen, softcap

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mix: Mix, scale: float | None) -> Tensor:
        """See `AttentionPlan.attend`; of this rank's tokens."""
        return self.context.attend(self, q, k, v, mix, scale)

    def attend_swapped(
        self, q: Tensor, k: Tensor, v: Tensor, mix: Mix, scale: float | None
    ) -> Tensor:
        """The same with the tokens and heads that this rank has after the swap."""
        if isinstance(self._seen, TokenRelations):
            assert self.context.rest is not None
            kernel = choose_kernel(q.device, self._softcap)
            factor = q.shape[-1] ** -0.5 if scale is None else scale
            how = SpreadAttention(self._seen, self.context.rest, kernel, factor)
            return how.gathered(q, k, v) if self.context.is_gathered else how.ring(q, k, v)
        if isinstance(self._seen, AttentionPlan):
            return self._seen.attend(q, k, v, mix, scale)
        mixed = mix(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), self._seen)
        return mixed.transpose(1, 2)


def _attend(
    tokens: SpreadTokens, q: Tensor, k: Tensor, v: Tensor, mix: Mix, scale: float | None
) -> Tensor:
    """q: [B, T, H, h]; k, v: [B, T, K, h] -> [B, T, H, h]"""
    swap = tokens.context.swap
    if swap is None:
        return tokens.attend_swapped(q, k, v, mix, scale)
    sizes = [x.shape[2] // swap.size for x in (q, k, v)]
    by_rank = zip(*(x.chunk(swap.size, 2) for x in (q, k, v)), strict=True)
    parts = swap.swap(torch.stack([torch.cat(some, 2) for some in by_rank]))
    chunks = [half for part in parts for half in part.chunk(2, 1)]
    order = all_chunks(swap.size)
    together = torch.cat([chunks[order.index(c)] for c in range(len(chunks))], 1)
    few_q, few_k, few_v = torch.split(together, sizes, 2)
    mixed = tokens.attend_swapped(few_q, few_k, few_v, mix, scale)  # [B, u * T, H / u, h]
    chunks = list(mixed.chunk(len(order), 1))
    owned = [torch.cat([chunks[c] for c in chunks_of(i, swap.size)], 1) for i in range(swap.size)]
    return torch.cat(list(swap.swap(torch.stack(owned))), 2)
