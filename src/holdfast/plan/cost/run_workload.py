"""The workload of a run file: the decoder's layers as shapes."""

from __future__ import annotations

from holdfast.config.model import ModelConfig
from holdfast.config.run import RunConfig
from holdfast.core.sharding.state_table import ITEM_BYTES, MIXED, STATE_DTYPE
from holdfast.plan.cost.workload import (
    Attention,
    ExpertGroup,
    Layer,
    Product,
    StateBytes,
    Workload,
)

_KERNELS_OF_BLOCK = 12
"""Launches of a block's forward besides products: norms, rotary, attention, activation, sums."""

_PEAK_OF = {"fp16": "bf16", "float64": "fp32"}
"""Precisions that tables of devices have no peak of, and the one that comes nearest."""


def workload_of(config: RunConfig) -> Workload:
    """Return what a step of this run computes. A vocabulary that is not planned yet counts as 0."""
    model, precision = config.model, config.train.precision
    layers = [_embedding(model)]
    layers += [_block(model, number) for number in range(model.layers)]
    layers.append(_head(model))
    is_mixed = precision in MIXED
    state_item = ITEM_BYTES[STATE_DTYPE[precision]]
    item = 2 if is_mixed else state_item
    state = StateBytes(item, state_item, (3 if is_mixed else 2) * state_item)
    return Workload(
        model.preset or "own",
        tuple(layers),
        config.data.sequence_length,
        config.train.batch_size,
        _PEAK_OF.get(precision, precision),
        item,
        state,
        model.vocab_size,
        model.tied_embeddings,
    )


def _embedding(model: ModelConfig) -> Layer:
    rows = model.vocab_rows
    return Layer(
        "embedding",
        model.dim,
        table_parameters=rows * model.dim,
        whole_moved=2 * model.dim,
        kernels=1,
        reductions=1,
        whole_kept=0,
    )


def _block(model: ModelConfig, number: int) -> Layer:
    dim, head = model.dim, model.head_size
    queries, keys = model.heads * head, model.kv_heads * head
    products = [
        Product(dim, queries, "columns"),
        Product(dim, keys, "columns"),
        Product(dim, keys, "columns"),
        Product(queries, dim, "rows"),
    ]
    experts, inner = None, model.ffn_dim
    if model.has_experts(number) and model.experts is not None:
        kind, inner = model.experts, model.inner_dim
        experts = ExpertGroup(kind.count, kind.top_k, _feed_forward(dim, inner))
        products.append(Product(dim, kind.count))
        products += _feed_forward(dim, inner * kind.shared) if kind.shared else ()
        inner *= kind.top_k + kind.shared
    else:
        products += _feed_forward(dim, inner)
    window = model.window if number in model.windowed else 0
    return Layer(
        "block",
        dim,
        tuple(products),
        Attention(model.heads, model.kv_heads, head, window),
        experts,
        whole_parameters=2 * dim,
        whole_moved=10 * dim,
        cut_moved=2 * (queries + keys) + 3 * inner,
        kernels=_KERNELS_OF_BLOCK,
        reductions=2,
        whole_kept=4 * dim,
        cut_kept=2 * queries + 2 * keys + 4 * inner,
    )


def _feed_forward(dim: int, inner: int) -> tuple[Product, ...]:
    into = Product(dim, inner, "columns")
    return into, into, Product(inner, dim, "rows")


def _head(model: ModelConfig) -> Layer:
    dim = model.dim
    return Layer(
        "head",
        dim,
        (Product(dim, model.vocab_rows, "columns"),),
        whole_parameters=dim,
        whole_moved=2 * dim,
        cut_moved=4 * model.vocab_rows,
        kernels=4,
        reductions=1,
        whole_kept=2 * dim,
    )
