"""Cached attention whose bits depend on a text alone.

Keys are read in blocks of a fixed size, and each block goes through a product of a fixed shape. The
results of blocks are added in their order. A block without a visible key adds exactly nothing. So
the longest text of a batch does not change the bits of another one.

Shapes: N texts, C tokens of each, H query heads, K key/value heads, G = H / K, h head dim. A block
has B keys, and there are n.
"""

from __future__ import annotations

import torch
from torch import Tensor

from holdfast.config.sections.model import ModelConfig
from holdfast.model.decoder import soft_limit
from holdfast.model.documents import AttentionPlan, Mix

BLOCK = 64  # keys of a block
TILE = 8  # slots that are decoded together


class Place:
    """Which slots of a tile a pass reads and writes, and where its tokens stand.

    Args:
        slots: of the tile, one for each row. Several rows may be tokens of one text: [N] int64.
        positions: [N, C] int64: of each token in its text.
        blocks: blocks that hold all keys that these tokens see.
    """

    def __init__(self, slots: slice | Tensor, positions: Tensor, blocks: int):
        self.slots, self.positions, self.blocks = slots, positions, blocks
        rows = torch.arange(TILE, device=positions.device)[slots, None].expand(positions.shape)
        self.index = positions // BLOCK, rows, slice(None), positions % BLOCK  # of new keys


class TileCache:
    """Keys and values of one layer, for the slots of one tile. As a `LayerCache` it takes new ones
    at `place`, which the owner sets before each pass."""

    def __init__(self, model: ModelConfig, capacity: int, like: Tensor):
        shape = capacity // BLOCK, TILE, model.kv_heads, BLOCK, model.head_size
        self.key, self.value = like.new_zeros(shape), like.new_zeros(shape)
        self.place: Place | None = None

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values [N, C, K, h] of new tokens; return the blocks that these tokens
        see: [n, N, K, B, h] each."""
        assert self.place is not None
        texts = self.place.positions.shape[0]
        self.key[self.place.index], self.value[self.place.index] = key[:texts], value[:texts]
        seen = slice(self.place.blocks), self.place.slots
        return self.key[seen], self.value[seen]

    def copy_text(self, source: TileCache, there: int, here: int, blocks: int) -> None:
        """Copy the first blocks of slot `there` of another tile into slot `here`."""
        self.key[:blocks, here] = source.key[:blocks, there]
        self.value[:blocks, here] = source.value[:blocks, there]


class CachedAttention(AttentionPlan):
    """Attention of one pass over cached keys.

    Args:
        window: how many tokens back a token sees, itself included; 0: all of its text.
        rows: texts of the batch, with those that only pad it.
    """

    def __init__(self, model: ModelConfig, place: Place, window: int, rows: int):
        self._cap, self._rows = model.attention_softcap, rows
        self._groups = model.heads // model.kv_heads
        at = place.positions
        index = torch.arange(place.blocks * BLOCK, device=at.device).view(-1, 1, 1, BLOCK)
        hidden = index > at[..., None]
        if window:
            hidden |= index <= at[..., None] - window  # [n, N, C, B]
        hidden = hidden[:, :, :, None].expand(-1, -1, -1, self._groups, -1)
        self._hidden = hidden.flatten(2, 3)[:, :, None]  # [n, N, 1, C G, B]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mix: Mix, scale: float | None) -> Tensor:
        """q: [N + padding, C, H, h]; k, v: [n, N, K, B, h] -> [N + padding, C, H, h]"""
        blocks, texts, heads, _, size = k.shape
        length = q.shape[1]
        asked = q[:texts].view(texts, length, heads, self._groups, size).transpose(1, 2)
        asked = asked.reshape(1, texts, heads, length * self._groups, size)
        asked = asked.expand(blocks, -1, -1, -1, -1).flatten(0, 2)
        scores = torch.bmm(asked, k.reshape(-1, BLOCK, size).transpose(1, 2))
        wide = torch.promote_types(scores.dtype, torch.float32)
        scores = scores.view(blocks, texts, heads, -1, BLOCK).to(wide)
        scores = scores * (size**-0.5 if scale is None else scale)
        if self._cap:
            scores = soft_limit(scores, self._cap)
        scores = scores.masked_fill(self._hidden, -torch.inf)
        weights = (scores - scores.amax(-1).amax(0)[..., None]).exp()
        total = _in_order(weights.sum(-1))[..., None]
        mixed = torch.bmm(weights.to(v.dtype).flatten(0, 2), v.reshape(-1, BLOCK, size))
        mixed = _in_order(mixed.view(blocks, texts, heads, -1, size).to(wide)) / total
        mixed = mixed.to(q.dtype).view(texts, heads, length, self._groups, size)
        out = mixed.transpose(1, 2).reshape(texts, length, -1, size)
        padding = out.new_zeros(self._rows - texts, *out.shape[1:])
        return torch.cat((out, padding)) if self._rows > texts else out


def _in_order(parts: Tensor) -> Tensor:
    """The sum over the first dim, from the first part to the last."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
