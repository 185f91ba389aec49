"""Two halves of a microbatch's samples go through each block of a decoder that tp cuts.

    half 1   gather | product           | scatter                | ...
    half 2            gather ~~~~~~~~~~~ | product ~~~~~~~~~~~~~~ | scatter

The second half's gather travels during the first half's product, and the first half's scatter
during the second one's product. So of four exchanges of a region two can hide. In the backward pass
autograd takes the nodes in reversed order, and each exchange begins where the forward pass waited.

The residual stream of a rank is its part of the first half's tokens, and then of the second half's.
Each half is padded by itself. A batch of an odd number of samples, as a validation may have, goes
through undivided.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.model.decoder import AttentionContext, Block, normed
from holdfast.options.protocols import Apply
from holdfast.parallel.axes.tensor_parallel import DecoderObjective, TensorParallel
from holdfast.parallel.comm.collectives import begin_with_gradient


class Halves(NamedTuple):
    """Angles or a mask, of either half."""

    first: Any
    second: Any


class TwoHalves:
    """The way of a tensor parallel decoder's microbatches in two halves."""

    def __init__(self, tensor: TensorParallel) -> None:
        self._tensor, self._collectives = tensor, tensor.collectives
        self._enter_whole, self._leave_whole = tensor.enter_region, tensor.leave_region

    @property
    def _is_halved(self) -> bool:
        return self._tensor.shape[0] % 2 == 0

    # --- the ends of the model -------------------------------------------------------------
    def enter_region(self, x: Tensor) -> Tensor:
        """The residual stream -> [B, S, D]"""
        if not self._is_halved:
            return self._enter_whole(x)
        begun = [self._begin_enter(half) for half in x.chunk(2)]
        return torch.cat([end() for end in begun])

    def leave_region(self, x: Tensor) -> Tensor:
        """Each rank's summand [B, S, D] -> the residual stream"""
        if not self._is_halved:
            return self._leave_whole(x)
        begun = [self._begin_leave(half) for half in x.chunk(2)]
        return torch.cat([end() for end in begun])

    def attention_context(
        self, whole: Any, tokens: Tensor, like: Tensor, documents: Tensor | None = None
    ) -> AttentionContext:
        """See `Decoder.attention_context`, which is `whole`."""
        if len(tokens) % 2:
            return whole(tokens, like, documents)  # type: ignore[no-any-return]
        packed = (None, None) if documents is None else documents.chunk(2)
        halves = zip(tokens.chunk(2), packed, strict=True)
        both = [whole(half, like, numbers) for half, numbers in halves]
        pairs: list[Any] = [Halves(*pair) for pair in zip(*both, strict=True)]
        return AttentionContext(*pairs)

    # --- a block ---------------------------------------------------------------------------
    def block(self, block: Block, whole: Any, x: Tensor, *context: Any) -> Tensor:
        """See `Block.forward`, which is `whole`."""
        if not self._is_halved:
            return whole(x, *context)  # type: ignore[no-any-return]
        rotary, mask = (pair or (None, None) for pair in context[:2])
        halves = x.chunk(2)
        begun = [self._begin_enter(normed(block.attention_norm, half)) for half in halves]
        sums = [
            self._begin_leave(block.attention.forward(end(), turned, seen))
            for end, turned, seen in zip(begun, rotary, mask, strict=True)
        ]
        between: list[Tensor] = []
        begun = []
        for half, end in zip(halves, sums, strict=True):
            between.append(half + block.added(block.attention_post_norm, end()))
            begun.append(self._begin_enter(normed(block.ffn_norm, between[-1])))
        sums = [self._begin_leave(block.ffn.forward(end())) for end in begun]
        return torch.cat(
            [
                half + block.added(block.ffn_post_norm, end())
                for half, end in zip(between, sums, strict=True)
            ]
        )

    # --- a half ----------------------------------------------------------------------------
    def _begin_enter(self, part: Tensor) -> Any:
        """[ceil(B/2*S / n), D] -> a call that returns [B/2, S, D]"""
        batch, sequence = self._tensor.shape
        ranks = self._collectives
        end = begin_with_gradient(part, ranks.start_gather, ranks.start_scatter)
        return lambda: end()[: batch // 2 * sequence].view(batch // 2, sequence, -1)

    def _begin_leave(self, summand: Tensor) -> Any:
        """[B/2, S, D] -> a call that returns [ceil(B/2*S / n), D]"""
        tokens, ranks = summand.flatten(0, 1), self._collectives
        missing = -tokens.shape[0] % ranks.size
        if missing:
            tokens = F.pad(tokens, (0, 0, 0, missing))
        return begin_with_gradient(tokens, ranks.start_scatter, ranks.start_gather)


def overlap_halves(objective: DecoderObjective) -> None:
    """Let the blocks of a decoder that `apply_tensor_parallel` has cut work in halves."""
    tensor, decoder = objective.tensor, objective.decoder
    assert tensor is not None, "tp cuts the decoder first"
    halves, outer = TwoHalves(tensor), tensor
    way: Any = halves
    outer.enter_region, outer.leave_region = way.enter_region, way.leave_region  # type: ignore[method-assign]
    changed: Any = decoder
    changed.attention_context = partial(halves.attention_context, decoder.attention_context)
    for block in decoder.layers:
        inside: Any = block
        inside.forward = partial(halves.block, block, block.forward)


APPLY = Apply(halves=overlap_halves)
