"""The part of a decoder that one pipeline stage holds.

Stages are runs of blocks. The first also embeds the tokens; the last also has the final norm and
the head. Parameters keep their names. A tied embedding is held by both ends: the last stage keeps
`embed.weight` as its head, and the two gradients of it add up.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import nn

from holdfast.model.decoder import Decoder
from holdfast.model.feed_forward import Linear
from holdfast.model.late_gradients import LateGradients


@dataclass(frozen=True)
class StagePart:
    """One pipeline stage of a decoder that holds one or several.

    blocks: positions of its blocks. is_last: it has the final norm and the head.
    """

    blocks: Collection[int]
    is_last: bool


def keep_stage(decoder: Decoder, blocks: Collection[int], first: bool, last: bool) -> None:
    """Drop in place what other ranks' stages hold; call it before the decoder gets its memory.

    blocks: positions of the blocks of this rank's stages, a part of range(layers), not empty.
    Raises ValueError for blocks that the decoder does not have.
    """
    if not blocks or not set(blocks) <= set(decoder.layers.positions):
        raise ValueError(f"blocks {list(blocks)} are not a part of {decoder.layers.positions}")
    decoder.layers.keep_only(blocks)
    if not first and not (last and decoder.config.has_tied_head):
        decoder.embed = None
    if not last:
        decoder.norm = decoder.head = decoder.score = None


def leave_weight_gradients(module: nn.Module) -> LateGradients:
    """Let the backward passes of a decoder's linear layers keep what their weights' gradients need.
    Frozen weights are left alone."""
    found = LateGradients()
    for layer in module.modules():
        if isinstance(layer, Linear):
            layer.late_gradients = found
    return found
