"""Attention that stays inside the documents of a packed row, without a mask of the row.

A row of S tokens holds several documents, one after another. A mask of [S, S] would tell them
apart, and its memory grows with S squared. Two ways need none:

    blocks   Each document goes through causal attention by itself, neighbours of equal length
             together. It runs on every device, for every family and dtype.
    varlen   One kernel of torch takes all documents and their ends. It needs an accelerator that
             has it, a dtype of 16 bits, and scores without a limit.

Memory is linear in S for both. (A limit of scores has no fused kernel: then memory grows with the
square of a document's length.) The two differ in their last bits. So a run uses one of them, which
`choose_document_attention` decides once for a rank's decoder.

Shapes: B batch, S sequence, H query heads, K key/value heads, h head dim, L a document's length.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import groupby
from typing import Any, Literal

import torch
from torch import Tensor

from holdfast.config.sections.model import ModelConfig

Way = Literal["blocks", "varlen"]

Mix = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""Attention of a decoder's family. It takes q [n, H, L, h], k and v [n, K, L', h], and what is
added to the scores [1, 1, L, L']. None: it is causal. It returns [n, H, L, h]."""

_PROBE_TOLERANCE = 0.05  # between the two ways, in 16 bits, of numbers between -1 and 1


class AttentionPlan:
    """Stands in place of a mask, and computes attention itself."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mix: Mix, scale: float | None) -> Tensor:
        """q: [B, S, H, h]; k, v: [B, S, K, h] -> [B, S, H, h]

        mix: attention of the decoder's family. scale: of the scores, as in `mix`; None:
        1 / sqrt(h).
        """
        raise NotImplementedError


class PackedDocuments(AttentionPlan):
    """The documents of one microbatch's rows, as attention needs them.

    It is no tensor and no dataclass, so the compiler does not look at the lengths. They differ in
    every microbatch.

    Attributes:
        lengths: tokens of each document, in the order of the flattened rows.
        ends: int32 [documents + 1], 0 and then the end of each document.
        window: how many tokens back a token sees, itself included; 0: all of its document.
        bias: what a window adds to the scores (see `window_bias`); None: no document needs it.
    """

    def __init__(self, how: DocumentAttention, lengths: tuple[int, ...], ends: Tensor) -> None:
        self.how, self.lengths, self.ends = how, lengths, ends
        self.longest = max(lengths)
        self.window = 0
        self.bias: Tensor | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mix: Mix, scale: float | None) -> Tensor:
        """See `AttentionPlan.attend`."""
        return self.how.attend(q, k, v, self, mix, scale)

    def within(self, window: int, dtype: torch.dtype) -> PackedDocuments:
        """Return the same documents for blocks that attend within `window` tokens."""
        near = PackedDocuments(self.how, self.lengths, self.ends)
        near.window = window
        if self.longest > window and self.how.way == "blocks":
            near.bias = window_bias(window, dtype, self.ends.device)
        return near


class DocumentAttention:
    """One of the two ways, and why it is this one."""

    def __init__(self, way: Way = "blocks", reason: str = "it runs on every device") -> None:
        self.way, self.reason = way, reason
        self.attend = _attend_blocks if way == "blocks" else _attend_varlen

    def exclude_from_compilation(self) -> None:
        """The compiler would unroll the loop over documents for each microbatch again. So a
        compiled block ends before it and begins after it."""
        aside: Any = torch.compiler.disable
        self.attend = aside(self.attend)

    def pack(self, documents: Tensor) -> PackedDocuments:
        """documents: [B, S], the number of each token's document in its row."""
        starts = first_tokens(documents).flatten().nonzero()[:, 0]
        ends = torch.cat((starts, starts.new_tensor([documents.numel()])))
        return PackedDocuments(self, tuple(ends.diff().tolist()), ends.to(torch.int32))


def choose_document_attention(
    model: ModelConfig, dtype: torch.dtype, device: torch.device
) -> DocumentAttention:
    """Return varlen where the device computes it as blocks do, tried on a few tokens; otherwise
    blocks, with the reason. dtype: that of queries and keys."""
    if device.type == "cpu":
        return DocumentAttention("blocks", "torch has no varlen kernel for a CPU")
    if model.attention_softcap:
        return DocumentAttention("blocks", "varlen cannot limit scores (model.attention_softcap)")
    if dtype not in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        return DocumentAttention("blocks", f"varlen computes in 16 bits, and this run in {name}")
    problem = varlen_problem(model, dtype, device)
    if problem is not None:
        return DocumentAttention("blocks", f"varlen does not run on {device.type}: {problem}")
    return DocumentAttention("varlen", f"{device.type} has the kernel")


def first_tokens(documents: Tensor) -> Tensor:
    """True for the first token of each document in its row.  [B, S] -> [B, S]"""
    first = torch.ones_like(documents, dtype=torch.bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return first


def document_positions(documents: Tensor) -> Tensor:
    """Distance of each token from its document's first one in this row.  [B, S] -> [B, S]"""
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    return index - torch.where(first_tokens(documents), index, 0).cummax(dim=1).values


def window_bias(window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What is added to the scores of `window` queries: 0 for a key that is seen, -inf for another.
    The keys begin `window` tokens before the queries.  [1, 1, window, 2 * window]"""
    seen = torch.ones(window, 2 * window, dtype=torch.bool, device=device).triu(1).tril(window)
    return torch.zeros(1, 1, *seen.shape, dtype=dtype, device=device).masked_fill(~seen, -torch.inf)


def _attend_blocks(
    q: Tensor, k: Tensor, v: Tensor, documents: PackedDocuments, mix: Mix, scale: float | None
) -> Tensor:
    """See `AttentionPlan.attend`. The tokens are split once and joined once: the gradient of a
    slice would be as large as all tokens, for each document."""
    groups = [(length, len(list(some))) for length, some in groupby(documents.lengths)]
    sizes = [length * count for length, count in groups]
    parts = zip(*(torch.split(x.flatten(0, 1), sizes) for x in (q, k, v)), strict=True)
    mixed = []
    for (length, count), part in zip(groups, parts, strict=True):
        one, key, value = (x.unflatten(0, (count, length)).transpose(1, 2) for x in part)
        out = _attend_within(one, key, value, documents, mix)  # [count, H, length, h]
        mixed.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(mixed).view(q.shape)


def _attend_within(q: Tensor, k: Tensor, v: Tensor, documents: PackedDocuments, mix: Mix) -> Tensor:
    """Causal attention of documents of one length. Under a window shorter than that, chunks of
    `window` queries see their own keys and those of the chunk before.
    q: [n, H, L, h]; k, v: [n, K, L, h] -> [n, H, L, h]"""
    window, bias = documents.window, documents.bias
    if bias is None or q.shape[2] <= window:
        return mix(q, k, v, None)
    queries, keys, values = (torch.split(x, window, 2) for x in (q, k, v))
    out = [mix(queries[0], keys[0], values[0], None)]
    for i in range(1, len(queries)):
        size = queries[i].shape[2]
        near = torch.cat(keys[i - 1 : i + 1], 2), torch.cat(values[i - 1 : i + 1], 2)
        out.append(mix(queries[i], *near, bias[:, :, :size, : window + size]))
    return torch.cat(out, 2)


def _attend_varlen(
    q: Tensor, k: Tensor, v: Tensor, documents: PackedDocuments, mix: Mix, scale: float | None
) -> Tensor:
    """See `AttentionPlan.attend`."""
    from torch.nn.attention.varlen import varlen_attn

    before = documents.window - 1 if documents.window else -1
    ends, longest = documents.ends, documents.longest
    asks = q.shape[2] != k.shape[2] and _has_grouped_flag()
    grouped: dict[str, Any] = {"enable_gqa": True} if asks else {}
    out: Any = varlen_attn(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        ends,
        ends,
        longest,
        longest,
        scale=scale,
        window_size=(before, 0),
        **grouped,
    )
    return out.view(q.shape)  # type: ignore[no-any-return]


def _has_grouped_flag() -> bool:
    """torch 2.11 takes grouped heads without the flag."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def varlen_problem(model: ModelConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    """Run both ways, forward and backward, on two short documents with the model's heads, and
    return why varlen cannot be used. None: they agree."""
    window, scale = 3 if model.windowed else 0, model.attention_scale or None

    def mix(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=bias, is_causal=bias is None, enable_gqa=True, scale=scale
        )

    def run(way: Way) -> list[Tensor]:
        how = DocumentAttention(way)
        documents = how.pack(torch.tensor([[0] * 5 + [1] * 3], device=device))
        documents = documents.within(window, dtype) if window else documents
        heads = (model.heads, model.kv_heads, model.kv_heads)
        given = [_wave(8, n, model.head_size).to(device, dtype).requires_grad_() for n in heads]
        out = documents.attend(given[0], given[1], given[2], mix, scale)
        return [out.detach(), *torch.autograd.grad(out.sum(), given)]

    try:
        pairs = list(zip(run("varlen"), run("blocks"), strict=True))
    except (ImportError, TypeError, ValueError, NotImplementedError, RuntimeError) as error:
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    apart = max(float((a - b).abs().max()) for a, b in pairs)
    return None if apart < _PROBE_TOLERANCE else f"its numbers are {apart:.2g} from those of blocks"


def _wave(tokens: int, heads: int, size: int) -> Tensor:
    """Numbers between -1 and 1 without a random generator.  [1, tokens, heads, size]"""
    count = tokens * heads * size
    return torch.arange(count, dtype=torch.float32).sin().view(1, tokens, heads, size)
