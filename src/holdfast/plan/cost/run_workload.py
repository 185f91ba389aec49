"""The workload of a run file: the decoder's layers as shapes."""

from __future__ import annotations

from dataclasses import replace

from holdfast.config.run import RunConfig
from holdfast.config.sections.model import ModelConfig
from holdfast.core.sharding.state_table import ITEM_BYTES, MIXED, STATE_DTYPE
from holdfast.plan.cost.blocks import FeedForward, Heads, KeptByRuntime, block, embedding, head
from holdfast.plan.cost.workload import Layer, StateBytes, Workload
from holdfast.plan.memory.activations import device_kind
from holdfast.plan.memory.pass_memory import CHUNK_ELEMENTS

_PEAK_OF = {"fp16": "bf16", "float64": "fp32"}
"""Precisions that tables of devices have no peak of, and the one that comes nearest."""


def workload_of(config: RunConfig) -> Workload:
    """Return what a step of this run computes. A vocabulary that is not planned yet counts as 0."""
    model, precision = config.model, config.train.precision
    is_mixed = precision in MIXED
    state_item = ITEM_BYTES[STATE_DTYPE[precision]]
    item = 2 if is_mixed else state_item
    device = device_kind(config)
    # a CPU's norm keeps two wide copies, a fused one its input
    norms = 2 * max(4, item) / item if device == "cpu" else 1.0
    kept = KeptByRuntime(norms, holds_inputs=True, is_compiled=config.train.compile)
    layers = [embedding(model.dim, model.vocab_rows)]
    degrees = config.layout.tp_by
    tp_by = (degrees.attention, degrees.ffn) if degrees.degrees else ()
    layers += [replace(_block(model, number, kept), tp_by=tp_by) for number in range(model.layers)]
    layers.append(head(model.dim, model.vocab_rows, kept))
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
        CHUNK_ELEMENTS[device],
        config.layout.reduction == "tree",
        device != "cpu",
        is_compiled=config.train.compile,
        cp_method=config.layout.cp_method,
        scatters_each=config.layout.shards_add_each == "microbatch",
    )


def _block(model: ModelConfig, number: int, kept: KeptByRuntime) -> Layer:
    window = model.window if number in model.windowed else 0
    feed = FeedForward(model.ffn_dim)
    if model.has_experts(number) and model.experts is not None:
        kind, inner = model.experts, model.inner_dim
        feed = FeedForward(inner, experts=kind.count, top_k=kind.top_k, shared=inner * kind.shared)
    heads = Heads(model.heads, model.kv_heads, model.head_size, window=window)
    return block(model.dim, heads, feed, kept=kept)


def unmodelled_key(config: RunConfig) -> tuple[str, str]:
    """Return the key that keeps a run from the cost model, with its value, and the reason; "" twice
    if the model knows the run."""
    layout = config.layout
    if config.lora.rank:
        return f"lora.rank {config.lora.rank}", "the cost model does not know adapters"
    if not config.trains_decoder:
        return f"task.name {config.task.name}", "the shapes of its layers are not known"
    if layout.replicas:
        return "layout.replicas", "the run file says what each replica is"
    if layout.is_asynchronous:
        return f"layout.schedule {layout.schedule}", "its curve depends on layout.pp"
    return "", ""
