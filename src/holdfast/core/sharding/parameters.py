"""The decoder's parameter table: name, global shape, decay and initial values, as data.

A layout shards, a checkpoint stores, an optimizer groups and an export renames this table. The
module in `model/decoder.py` has exactly these parameters under exactly these names.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the mover has no use for pydantic
    from holdfast.config.sections.model import ModelConfig


EXPERTS = ".ffn.experts."
"""In the names of the matrices of experts, whose dim 0 counts experts."""

SCORE = "score.weight"
"""The head [1, D] that gives each token a value."""

BALANCE = "balance"
"""Merge of a bias that a step moves by the choices that its experts have got."""


@dataclass(frozen=True, slots=True)
class Normal:
    """Independent draws from N(0, std^2)."""

    std: float


@dataclass(frozen=True, slots=True)
class Uniform:
    """Independent draws from [-bound, bound)."""

    bound: float


@dataclass(frozen=True, slots=True)
class Ones:
    """The gain of a norm before training."""


@dataclass(frozen=True, slots=True)
class Zeros:
    """All zeros."""


@dataclass(frozen=True, slots=True)
class Own:
    """The values that the task's module gives the parameter when it is made."""


Init = Normal | Uniform | Ones | Zeros | Own


@dataclass(frozen=True, slots=True)
class Parameter:
    """One row: `shape` is global, `decay` says whether AdamW's weight decay applies.

    padding: so many rows at the end of dim 0 belong to no token. They start at zero, get
        gradients of exactly zero, and so stay zero.
    merge: "" for a parameter. For a buffer that a forward pass changes, it names what the step
        adds: the "mean" or the "sum" of its microbatches' changes. They travel as gradients do. A
        `BALANCE` one moves up or down by a rate, to where its sum has its part of all.
    frozen: it keeps its values, and no group of the optimizer's lets it decay.
    """

    name: str
    shape: tuple[int, ...]
    decay: bool
    init: Init
    padding: int = 0
    merge: str = ""
    frozen: bool = False

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def decoder_parameters(model: ModelConfig) -> tuple[Parameter, ...]:
    """All parameters of the decoder, in the order of the forward pass.

    Matrices start from N(0, init_std^2). Those that write into the residual stream (`attention.o`
    and `ffn.down`) start smaller by sqrt(2 * layers). So the stream's variance does not grow with
    the number of terms added to it (GPT-2: Radford et al. 2019, section 2.3). Matrices decay, norm
    gains and biases do not. A tied head has no row of its own.
    """
    normal = Normal(model.init_std)
    vocabulary = (model.vocab_rows, model.dim)
    padding = model.vocab_rows - model.vocab_size
    rows = [Parameter("embed.weight", vocabulary, True, normal, padding)]
    for layer in range(model.layers):
        rows.extend(_block(model, f"layers.{layer}.", model.has_experts(layer)))
    rows.append(_gain(model, "norm.weight", model.dim))
    if model.has_language_head and not model.tied_embeddings:
        rows.append(Parameter("head.weight", vocabulary, True, normal, padding))
    if model.score_head != "none":
        rows.append(Parameter(SCORE, (1, model.dim), True, normal))
    return tuple(rows)


def _block(model: ModelConfig, prefix: str, has_experts: bool) -> Iterator[Parameter]:
    """The rows of one block: attention, then the feed-forward, each between its norms."""
    dim, head = model.dim, model.head_size
    query, key_value = model.heads * head, model.kv_heads * head
    normal = Normal(model.init_std)
    residual = Normal(model.init_std / math.sqrt(2 * model.layers))
    before, after = model.norms != "post", model.norms != "pre"

    if before:
        yield _gain(model, f"{prefix}attention_norm.weight", dim)
    for name, size in (("q", query), ("k", key_value), ("v", key_value)):
        yield Parameter(f"{prefix}attention.{name}.weight", (size, dim), True, normal)
        if model.attention_bias != "none":
            yield Parameter(f"{prefix}attention.{name}.bias", (size,), False, Zeros())
    if model.qk_norm:
        wide = model.qk_norm_width == "all"
        yield _gain(model, f"{prefix}attention.q_norm.weight", query if wide else head)
        yield _gain(model, f"{prefix}attention.k_norm.weight", key_value if wide else head)
    yield Parameter(f"{prefix}attention.o.weight", (dim, query), True, residual)
    if model.attention_bias == "qkvo":
        yield Parameter(f"{prefix}attention.o.bias", (dim,), False, Zeros())
    if after:
        yield _gain(model, f"{prefix}attention_post_norm.weight", dim)
    if before:
        yield _gain(model, f"{prefix}ffn_norm.weight", dim)
    feed_forward = _experts if has_experts else _dense
    yield from feed_forward(model, f"{prefix}ffn.", normal, residual)
    if after:
        yield _gain(model, f"{prefix}ffn_post_norm.weight", dim)


def _dense(
    model: ModelConfig, prefix: str, normal: Init, residual: Init, width: int = 0
) -> Iterator[Parameter]:
    """A gated feed-forward. width: 0: the model's."""
    ffn = width or model.ffn_dim
    yield Parameter(f"{prefix}gate.weight", (ffn, model.dim), True, normal)
    yield Parameter(f"{prefix}up.weight", (ffn, model.dim), True, normal)
    yield Parameter(f"{prefix}down.weight", (model.dim, ffn), True, residual)


def _experts(model: ModelConfig, prefix: str, normal: Init, residual: Init) -> Iterator[Parameter]:
    """A router, its experts, and those that compute every token."""
    config, dim, ffn = model.experts, model.dim, model.inner_dim
    assert config is not None
    yield Parameter(f"{prefix}router.weight", (config.count, dim), True, normal)
    if config.choice_bias:
        yield Parameter(
            f"{prefix}router.choice_bias", (config.count,), False, Zeros(), merge=BALANCE
        )
    inner = f"{prefix}experts."
    yield Parameter(f"{inner}gate.weight", (config.count, ffn, dim), True, normal)
    yield Parameter(f"{inner}up.weight", (config.count, ffn, dim), True, normal)
    yield Parameter(f"{inner}down.weight", (config.count, dim, ffn), True, residual)
    if config.shared:
        yield from _dense(model, f"{prefix}shared.", normal, residual, config.shared * ffn)


def balanced_rows(
    rows: Iterable[Parameter], model: ModelConfig, choices: float
) -> tuple[Parameter, ...]:
    """The rows of a run whose microbatches have `choices` choices in a block: those that count
    choices know how many are an expert's part."""
    config = model.experts
    if config is None:
        return tuple(rows)
    merge = f"{BALANCE} {config.bias_rate} {choices / config.count}"
    return tuple(replace(row, merge=merge) if row.merge == BALANCE else row for row in rows)


def _gain(model: ModelConfig, name: str, size: int) -> Parameter:
    return Parameter(name, (size,), False, Zeros() if model.norm_plus_one else Ones())


def count_idle_parameters(model: ModelConfig) -> int:
    """Number of parameters that a token does not use: those of the experts that it has not."""
    if model.experts is None:
        return 0
    idle = model.experts.count - model.experts.top_k
    blocks = max(0, model.layers - model.experts.first)
    return blocks * idle * 3 * model.dim * model.inner_dim


def count_parameters(model: ModelConfig, *, embeddings: bool = True) -> int:
    """Number of parameters, padding rows included. Without `embeddings`, the token embedding is
    left out; a tied head counts once in any case, because it is the same tensor."""
    return sum(
        row.size for row in decoder_parameters(model) if embeddings or row.name != "embed.weight"
    )
