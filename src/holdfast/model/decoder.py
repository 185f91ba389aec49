"""One decoder, as single-device maths.

This is a pre-norm transformer in the form that Llama (Touvron et al. 2023) and Qwen 3 share. It has
RMSNorm (Zhang and Sennrich 2019) and rotary positions. The key and value heads of its attention
serve groups of query heads (Ainslie et al. 2023). Its feed-forward is SwiGLU (Shazeer 2020).
Nothing here knows of ranks or meshes; what is sharded is decided from outside, by parameter name.

Shapes: B batch, S sequence, D model dim, H query heads, K key/value heads, h head dim,
F feed-forward dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.config.model import ModelConfig
from holdfast.model.rotary import Rotary, RotaryTable, rotate


class LayerCache(Protocol):
    """Keys and values of the tokens seen so far, of one layer (see `generate.py`)."""

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Take those of new tokens, give those of all: each [B, S, K, h]."""
        ...


class Linear(nn.Linear):
    """x W^T without a bias, and without torch's own random start (see `init.py`)."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        """Leave the memory as it is."""


class Embedding(nn.Embedding):
    """A row per token, without torch's own random start."""

    def reset_parameters(self) -> None:
        """Leave the memory as it is."""


class RMSNorm(nn.Module):
    """x / rms(x) * gain, over the last dim; the rms is taken in at least float32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., size] -> [..., size], in x's dtype (fused where the gain has it too)"""
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Causal attention of H query heads over K key/value heads."""

    def __init__(self, model: ModelConfig):
        super().__init__()
        self.head = model.head_size
        query, key_value = model.heads * self.head, model.kv_heads * self.head
        self.grouped = model.heads != model.kv_heads
        self.q = Linear(model.dim, query)
        self.k = Linear(model.dim, key_value)
        self.v = Linear(model.dim, key_value)
        self.q_norm = RMSNorm(self.head, model.norm_eps) if model.qk_norm else None
        self.k_norm = RMSNorm(self.head, model.norm_eps) if model.qk_norm else None
        self.o = Linear(query, model.dim)

    def forward(
        self, x: Tensor, rotary: Rotary, mask: Tensor | None, cache: LayerCache | None = None
    ) -> Tensor:
        """x: [B, S, D] -> [B, S, D]; mask: [B, 1, S, S'], true where a query sees a key."""
        heads = (*x.shape[:-1], -1, self.head)
        q, k, v = self.q(x).view(heads), self.k(x).view(heads), self.v(x).view(heads)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, rotary), rotate(k, rotary)  # q: [B, S, H, h]   k, v: [B, S, K, h]
        if cache is not None:
            k, v = cache.append(k, v)
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None and q.shape[1] == k.shape[1],
            enable_gqa=self.grouped,
        )
        return self.o(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))"""

    def __init__(self, model: ModelConfig):
        super().__init__()
        self.gate = Linear(model.dim, model.ffn_dim)
        self.up = Linear(model.dim, model.ffn_dim)
        self.down = Linear(model.ffn_dim, model.dim)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, S, D] -> [B, S, D], through [B, S, F]"""
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """x + attention(norm(x)), then x + ffn(norm(x)); the unit of sharding and compilation."""

    def __init__(self, model: ModelConfig):
        super().__init__()
        self.attention_norm = RMSNorm(model.dim, model.norm_eps)
        self.attention = Attention(model)
        self.ffn_norm = RMSNorm(model.dim, model.norm_eps)
        self.ffn = SwiGLU(model)

    def forward(
        self, x: Tensor, rotary: Rotary, mask: Tensor | None, cache: LayerCache | None = None
    ) -> Tensor:
        """x: [B, S, D] -> [B, S, D]"""
        x = x + self.attention(self.attention_norm(x), rotary, mask, cache)
        return x + self.ffn(self.ffn_norm(x))  # type: ignore[no-any-return]


class Blocks(nn.Module):
    """The blocks that are here, by their position in the full decoder.

    A pipeline stage holds some of them only, so positions may begin above 0; parameters are named
    `layers.<position>.` wherever they are. Iterates over blocks in order, like a list.
    """

    def __init__(self, blocks: Iterable[Block]):
        super().__init__()
        for position, block in enumerate(blocks):
            self.add_module(str(position), block)

    @property
    def positions(self) -> tuple[int, ...]:
        """Of the blocks that are here, rising."""
        return tuple(int(name) for name in self._modules)

    def items(self) -> Iterator[tuple[int, Block]]:
        """(position, block) in order."""
        return zip(self.positions, self, strict=True)

    def keep_only(self, positions: Iterable[int]) -> None:
        """Drop every block at another position."""
        kept = set(positions)
        for position in self.positions:
            if position not in kept:
                delattr(self, str(position))

    def __iter__(self) -> Iterator[Block]:
        return iter(self._modules.values())  # type: ignore[arg-type]

    def __getitem__(self, position: int) -> Block:
        return self._modules[str(position)]  # type: ignore[return-value]

    def __setitem__(self, position: int, block: nn.Module) -> None:
        self._modules[str(position)] = block

    def __len__(self) -> int:
        return len(self._modules)


class AttentionContext(NamedTuple):
    """The tokens as attention sees them: their rotary angles, and the mask."""

    rotary: Rotary
    mask: Tensor | None


class Decoder(nn.Module):
    """Tokens to logits. Build it under `torch.device("meta")`, give it memory with `to_empty`,
    fill it with `init.initialise` or from a checkpoint: nothing here draws random numbers.

    It runs in parts, `embed`, `attention_context`, `blocks`, `norm` and `unembed`. So a pipeline
    stage (see `stage.py`) can run the parts that it has; the rest are None there, or dropped.
    """

    def __init__(self, model: ModelConfig):
        super().__init__()
        self.config = model
        self.embed: Embedding | None = Embedding(model.vocab_rows, model.dim)
        self.layers = Blocks(Block(model) for _ in range(model.layers))
        self.norm: RMSNorm | None = RMSNorm(model.dim, model.norm_eps)
        self.head = None if model.tied_embeddings else Linear(model.dim, model.vocab_rows)
        self.rotary = RotaryTable(model)

    def forward(
        self,
        tokens: Tensor,
        documents: Tensor | None = None,
        positions: Tensor | None = None,
        caches: Sequence[LayerCache] | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """tokens: [B, S] -> logits: [B, S, V]. See `hidden` and `attention_context` for the
        rest."""
        return self.unembed(self.hidden(tokens, documents, positions, caches, mask))

    def hidden(
        self,
        tokens: Tensor,
        documents: Tensor | None = None,
        positions: Tensor | None = None,
        caches: Sequence[LayerCache] | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """tokens: [B, S] -> what the head reads: [B, S, D], of a decoder that has all its parts.

        With `caches`, one per layer, the tokens follow those already cached.
        """
        assert self.embed is not None
        assert self.norm is not None
        x = self.embed(tokens)  # [B, S, D]
        x = self.blocks(x, self.attention_context(tokens, x, documents, positions, mask), caches)
        return self.norm(x)  # type: ignore[no-any-return]

    def attention_context(
        self,
        tokens: Tensor,
        like: Tensor,
        documents: Tensor | None = None,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> AttentionContext:
        """Angles and mask of tokens [B, S], for a residual stream of the dtype of `like`.

        `documents` [B, S] numbers the document of each token: attention then stays inside a
        document, and positions restart with it. `positions` [B, S] overrides the positions.
        `mask` [B | 1, 1, S, S'] says which keys each token sees (none: all of them before it).
        """
        rows = tokens.shape[1] if positions is None else self.config.max_position
        if documents is not None:
            mask = document_mask(documents)
            positions = document_positions(documents) if positions is None else positions
        return AttentionContext(self.rotary(rows, positions, like), mask)

    def blocks(
        self, x: Tensor, context: AttentionContext, caches: Sequence[LayerCache] | None = None
    ) -> Tensor:
        """The residual stream through the blocks that are here.  x: [B, S, D] -> [B, S, D]"""
        for index, block in enumerate(self.layers):
            x = block(
                x, context.rotary, context.mask, caches[index] if caches is not None else None
            )
        return x

    def unembed(self, hidden: Tensor) -> Tensor:
        """hidden: [..., D] -> logits: [..., V], without those of padding rows"""
        return F.linear(hidden, self.head_weight[: self.config.vocab_size])

    @property
    def head_weight(self) -> Tensor:
        """The head's rows, which are the embedding's where they are tied; padding rows come last.
        [rows of the vocabulary, D]"""
        part = self.embed if self.config.tied_embeddings else self.head
        assert part is not None, "this stage has no head"
        return part.weight


def document_mask(documents: Tensor) -> Tensor:
    """True where a query may see a key: not later, same document.  [B, S] -> [B, 1, S, S]"""
    length = documents.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
    return ((documents[:, :, None] == documents[:, None, :]) & causal)[:, None]


def document_positions(documents: Tensor) -> Tensor:
    """Distance of each token from its document's first one in this row.  [B, S] -> [B, S]"""
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    first = torch.ones_like(documents, dtype=torch.bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return index - torch.where(first, index, 0).cummax(dim=1).values
