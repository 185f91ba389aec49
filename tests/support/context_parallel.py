"""The `cp` axis, written as a new axis would be: one file that nothing else knows of.

It is the example of docs/axes.md, and what `test_new_axis.py` trains with. Each rank has a
contiguous part of every sample's tokens. Operations on single tokens need nothing. Attention needs
the keys and values of all tokens, which are gathered. (That is the simplest way; a ring, Liu et al.
2023, arXiv 2310.01889, holds less.) A gathered key's gradient is the sum over the ranks that read
it: a reduce-scatter. Parameters are complete on every rank and their gradients are parts. The cells
of `core/sharding/reduction_cells.py` add these. The loss is summed over the ranks, so that each of
them knows it.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from holdfast.model.decoder import Decoder
from holdfast.model.documents import document_positions
from holdfast.model.rotary import Rotary
from holdfast.parallel.comm.collectives import Collectives
from holdfast.parallel.tensor_parallel import DecoderObjective
from tests.support.models import document_mask


class ContextParallel:
    """One decoder, or a stage of one, whose ranks have S / n tokens of every sample.

    It takes the place of the cache in attention: what `append` returns is what is attended to.
    """

    def __init__(self, decoder: Decoder, collectives: Collectives):
        self._decoder, self._collectives = decoder, collectives
        self._rotary: Rotary | None = None
        self._mask: Tensor | None = None

    def begin(self, module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """Before the objective: give it this rank's part of tokens and targets, [B, S] each, and
        note where they stand and what they see. Of what comes in from a stage before, each rank
        has its part already."""
        tokens, targets, documents, *incoming = given
        length = tokens.shape[1]
        size = length // self._collectives.size
        rows = slice(self._collectives.rank * size, (self._collectives.rank + 1) * size)
        known = tokens.new_zeros(tokens.shape) if documents is None else documents
        positions = document_positions(known)[:, rows]
        like = next(self._decoder.parameters())
        self._rotary = self._decoder.rotary(length, positions, like)
        self._mask = document_mask(known)[:, :, rows]  # [B, 1, S / n, S]
        return (tokens[:, rows], targets[:, rows], None, *incoming)

    def look(self, module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """Before each attention: its angles, its mask, and this object as its cache."""
        return (given[0], self._rotary, self._mask, self)

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of this rank's tokens, [B, S / n, K, h] -> of all, [B, S, K, h]"""
        return self._all(key), self._all(value)

    def end(self, module: nn.Module, given: tuple[Any, ...], out: Tensor) -> Tensor:
        """After the objective: the loss of all tokens; a residual stream stays as it is."""
        return out if out.dim() else self._collectives.reduce(out)

    def _all(self, x: Tensor) -> Tensor:
        return self._collectives.gather(x.transpose(0, 1)).transpose(0, 1)


def apply_context_parallel(objective: DecoderObjective, group: dist.ProcessGroup) -> None:
    """Compute the objective's decoder, or the stage of one, over the ranks of `group`."""
    context = ContextParallel(objective.decoder, Collectives(group))
    for block in objective.decoder.layers:
        block.attention.register_forward_pre_hook(context.look)
    assert isinstance(objective, nn.Module)
    objective.register_forward_pre_hook(context.begin)
    objective.register_forward_hook(context.end)
