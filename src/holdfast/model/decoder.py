"""One decoder, as single-device maths.

This is the transformer of Llama (Touvron et al. 2023) and its relatives. It has RMSNorm (Zhang and
Sennrich 2019) and rotary positions. The key and value heads of its attention serve groups of query
heads (Ainslie et al. 2023). Its feed-forward has a gate (SwiGLU, GeGLU: Shazeer 2020). What the
relatives differ in are keys of ModelConfig: norms, biases, windows, scales, limits of logits, and
experts in place of the feed-forward (`experts.py`). Nothing here knows of ranks or meshes; what is
sharded is decided from outside, by parameter name.

Shapes: B batch, S sequence, D model dim, H query heads, K key/value heads, h head dim,
F feed-forward dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.config.sections.model import ModelConfig
from holdfast.model.documents import (
    AttentionPlan,
    DocumentAttention,
    PackedDocuments,
    document_positions,
)
from holdfast.model.experts import RoutedFeedForward
from holdfast.model.feed_forward import GatedFeedForward, Linear
from holdfast.model.rotary import Rotary, RotaryTable, rotate


class LayerCache(Protocol):
    """Keys and values of the tokens seen so far, of one layer (see `generate.py`)."""

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Take those of new tokens, give those of all: each [B, S, K, h]."""
        ...


Mask = Tensor | AttentionPlan | None
"""[B | 1, 1, S, S'], true where a query sees a key. Or what computes attention itself, such as the
documents that hide each other. None: a query sees all tokens before it."""


class Embedding(nn.Embedding):
    """A row per token, without torch's own random start."""

    def reset_parameters(self) -> None:
        """Leave the memory as it is."""


class RMSNorm(nn.Module):
    """x / rms(x) * gain, over the last dim; the rms is taken in at least float32.

    plus_one: the gain is 1 + weight, taken in at least float32.
    """

    def __init__(self, size: int, eps: float, plus_one: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps, self.plus_one = eps, plus_one

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., size] -> [..., size], in x's dtype (fused where the gain has it too)"""
        if self.plus_one:
            wide = x if x.dtype == torch.float64 else x.float()
            gain = 1.0 + self.weight.to(wide.dtype)
            return F.rms_norm(wide, gain.shape, gain, self.eps).to(x.dtype)
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Causal attention of H query heads over K key/value heads."""

    def __init__(self, model: ModelConfig):
        super().__init__()
        self.head = model.head_size
        query, key_value = model.heads * self.head, model.kv_heads * self.head
        self.grouped = model.heads != model.kv_heads
        self.scale = model.attention_scale or None  # None: 1 / sqrt(h)
        self.softcap = model.attention_softcap
        bias = model.attention_bias != "none"
        self.q = Linear(model.dim, query, bias)
        self.k = Linear(model.dim, key_value, bias)
        self.v = Linear(model.dim, key_value, bias)
        self.norm_all = model.qk_norm_width == "all"
        sizes = (query, key_value) if self.norm_all else (self.head, self.head)
        self.q_norm, self.k_norm = (_norm(model, model.qk_norm, size) for size in sizes)
        self.o = Linear(query, model.dim, model.attention_bias == "qkvo")

    def forward(
        self, x: Tensor, rotary: Rotary | None, mask: Mask, cache: LayerCache | None = None
    ) -> Tensor:
        """x: [B, S, D] -> [B, S, D]. Without `rotary`, positions do not enter. A cache holds one
        document, so packed documents do not go with it."""
        heads = (*x.shape[:-1], -1, self.head)
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.norm_all:
            q, k = normed(self.q_norm, q), normed(self.k_norm, k)
        q, k, v = q.view(heads), k.view(heads), v.view(heads)
        if not self.norm_all:
            q, k = normed(self.q_norm, q), normed(self.k_norm, k)
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)  # q: [B, S, H, h]   k, v: [B, S, K, h]
        if cache is not None:
            k, v = cache.append(k, v)
        if isinstance(mask, AttentionPlan):
            mixed = mask.attend(q, k, v, self._mix, self.scale)  # [B, S, H, h]
            return self.o(mixed.flatten(2))  # type: ignore[no-any-return]
        mixed = self._mix(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
        return self.o(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """q: [B, H, S, h]; k, v: [B, K, S', h] -> [B, H, S, h]"""
        causal = mask is None
        if q.shape[2] != k.shape[2]:  # a branch: the kernel takes no symbol of the compiler
            causal = False
        if self.softcap:
            return softcapped_attention(q, k, v, mask, causal, self.scale, self.softcap)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=self.grouped, scale=self.scale
        )


def softcapped_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    cap: float,
) -> Tensor:
    """Attention whose scores stay within +-cap (Gemma 2, section 2): no fused kernel has that.
    q: [B, H, S, h]; k, v: [B, K, S', h] -> [B, H, S, h]"""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = soft_limit(scores, cap)
    if causal:
        mask = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        is_bias = mask.is_floating_point()
        scores = scores + mask if is_bias else scores.masked_fill(~mask, -torch.inf)
    wide = torch.float64 if scores.dtype == torch.float64 else torch.float32
    return scores.softmax(-1, dtype=wide).to(v.dtype) @ v


def soft_limit(x: Tensor, cap: float) -> Tensor:
    """x, smoothly limited to +-cap"""
    return (x / cap).tanh() * cap


class Block(nn.Module):
    """x + attention(norm(x)), then x + ffn(norm(x)); the unit of sharding and compilation. The
    norms stand before, after, or both."""

    def __init__(self, model: ModelConfig, number: int = 0):
        super().__init__()
        before, after = model.norms != "post", model.norms != "pre"
        self.residual_multiplier = model.residual_multiplier
        self.attention_norm = _norm(model, before, model.dim)
        self.attention = Attention(model)
        self.attention_post_norm = _norm(model, after, model.dim)
        self.ffn_norm = _norm(model, before, model.dim)
        self.ffn = (
            GatedFeedForward(model.dim, model.ffn_dim, model.activation)
            if model.experts is None or not model.has_experts(number)
            else RoutedFeedForward(model, model.experts)
        )
        self.ffn_post_norm = _norm(model, after, model.dim)

    def forward(
        self, x: Tensor, rotary: Rotary | None, mask: Mask, cache: LayerCache | None = None
    ) -> Tensor:
        """x: [B, S, D] -> [B, S, D]"""
        y = self.attention(normed(self.attention_norm, x), rotary, mask, cache)
        x = x + self.added(self.attention_post_norm, y)
        y = self.ffn(normed(self.ffn_norm, x))
        return x + self.added(self.ffn_post_norm, y)

    def added(self, norm: RMSNorm | None, y: Tensor) -> Tensor:
        """What a part's output adds to the residual stream. norm: the one after it."""
        y = normed(norm, y)
        return y if self.residual_multiplier == 1.0 else y * self.residual_multiplier


def _norm(model: ModelConfig, wanted: bool, size: int) -> RMSNorm | None:
    return RMSNorm(size, model.norm_eps, model.norm_plus_one) if wanted else None


def normed(norm: RMSNorm | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


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
    """The tokens as attention sees them: their rotary angles, and the mask. `window_*`: those of
    blocks that attend within a window."""

    rotary: Rotary
    mask: Mask
    window_rotary: Rotary
    window_mask: Mask


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
        self.layers = Blocks(Block(model, number) for number in range(model.layers))
        self.norm = _norm(model, True, model.dim)
        has_own_head = model.has_language_head and not model.tied_embeddings
        self.head = Linear(model.dim, model.vocab_rows) if has_own_head else None
        self.score = None if model.score_head == "none" else Linear(model.dim, 1)
        self.rotary = RotaryTable(model)
        own = model.windowed and model.window_rope_theta
        self.window_rotary = RotaryTable(model, windowed=True) if own else self.rotary
        self._windowed, self._unturned = set(model.windowed), set(model.no_rope_layers)
        self.document_attention = DocumentAttention()
        self.before_block: Callable[[int], None] | None = None  # is called with its position

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
        assert self.norm is not None
        x = self.embed_tokens(tokens)  # [B, S, D]
        x = self.blocks(x, self.attention_context(tokens, x, documents, positions, mask), caches)
        return self.norm(x)  # type: ignore[no-any-return]

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        """tokens: [B, S] -> the residual stream's beginning: [B, S, D]"""
        assert self.embed is not None, "a later stage needs what comes in"
        x: Tensor = self.embed(tokens)
        scale = self.config.embedding_multiplier
        return x if scale == 1.0 else x * scale

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
        packed: PackedDocuments | None = None
        if documents is not None:
            packed = self.document_attention.pack(documents)
            positions = document_positions(documents) if positions is None else positions
        rotary = self.rotary(rows, positions, like)
        far, window = mask if packed is None else packed, self.config.window
        if not self._windowed:
            return AttentionContext(rotary, far, rotary, far)
        if packed is not None:
            near: Mask = packed.within(window, like.dtype)
        else:
            near = window_mask(mask, tokens.shape[1], window, tokens.device)
        own = self.window_rotary is not self.rotary
        turned = self.window_rotary(rows, positions, like) if own else rotary
        return AttentionContext(rotary, far, turned, near)

    def blocks(
        self,
        x: Tensor,
        context: AttentionContext,
        caches: Sequence[LayerCache] | None = None,
        positions: Collection[int] | None = None,
    ) -> Tensor:
        """The residual stream through the blocks that are here, or those at `positions`.

        x: [B, S, D] -> [B, S, D]
        """
        for index, (position, block) in enumerate(self.layers.items()):
            if positions is not None and position not in positions:
                continue
            if self.before_block is not None:
                self.before_block(position)
            near = position in self._windowed
            rotary = context.window_rotary if near else context.rotary
            mask = context.window_mask if near else context.mask
            x = block(
                x,
                None if position in self._unturned else rotary,
                mask,
                caches[index] if caches is not None else None,
            )
        return x

    def head_input(self, hidden: Tensor) -> Tensor:
        """hidden: [..., D] -> what the head's rows are multiplied with: [..., D]"""
        divisor = self.config.logit_divisor
        return hidden if divisor == 1.0 else hidden / divisor

    def unembed(self, hidden: Tensor) -> Tensor:
        """hidden: [..., D] -> logits: [..., V], without those of padding rows"""
        logits = F.linear(self.head_input(hidden), self.head_weight[: self.config.vocab_size])
        cap = self.config.logit_softcap
        return soft_limit(logits, cap) if cap else logits

    @property
    def head_weight(self) -> Tensor:
        """The head's rows, which are the embedding's where they are tied; padding rows come last.
        [rows of the vocabulary, D]"""
        part = self.embed if self.config.tied_embeddings else self.head
        assert part is not None, "this stage has no head"
        return part.weight


def window_mask(
    mask: Tensor | None, length: int, window: int, device: torch.device
) -> Tensor | None:
    """`mask` (none: causal), less the keys that are `window` or more tokens away. The S queries
    are the last of the S' keys.  [B | 1, 1, S, S'] or none where all keys are near"""
    keys = length if mask is None else mask.shape[-1]
    if keys <= window:
        return mask
    index = torch.arange(keys, device=device)
    distance = index[keys - length :, None] - index  # [S, S']
    near = (distance < window)[None, None]
    return near & (distance >= 0) if mask is None else mask & near
