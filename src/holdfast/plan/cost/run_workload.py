"""The workload of a run file: the decoder's layers as shapes."""

from __future__ import annotations

from dataclasses import replace

from holdfast.config.run import RunConfig
from holdfast.config.sections.degrees import find_impossible_degrees
from holdfast.config.sections.model import ModelConfig
from holdfast.core.sharding.adapters import adapter_shardings, lora_parameters
from holdfast.core.sharding.parameters import count_parameters
from holdfast.core.sharding.state_table import ITEM_BYTES, MIXED, STATE_DTYPE
from holdfast.plan.cost.blocks import FeedForward, Heads, KeptByRuntime, block, embedding, head
from holdfast.plan.cost.workload import Layer, StateBytes, Workload
from holdfast.plan.memory.activations import device_kind
from holdfast.plan.memory.block_parts import GATE_UP, QUERY_KEY_VALUE, BlockOptions
from holdfast.plan.memory.pass_memory import loss_chunk

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
    options = BlockOptions.of(config, device)
    is_fused = device != "cpu" or options.is_compiled
    norms = 1.0 if is_fused else (1 if options.adapters else 2) * max(4, item) / item
    kept = KeptByRuntime(norms, holds_inputs=True, is_compiled=config.train.compile)
    layers = [embedding(model.dim, model.vocab_rows)]
    blocks = (_block(model, number, kept, options) for number in range(model.layers))
    layers += [replace(each, part_tp=config.layout.part_tp) for each in blocks]
    layers.append(head(model.dim, model.vocab_rows, kept))
    optimizer, trained = (3 if is_mixed else 2) * state_item, _trained_share(config)
    state = StateBytes(item, state_item, optimizer)
    if trained < 1:  # the base has weights alone
        own = (item * (1 + trained), state_item * trained, optimizer * trained)
        state = StateBytes(*own, touched=state.updated * trained)
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
        loss_chunk(config, device) * max(1, model.vocab_size),
        config.layout.reduction == "tree",
        device != "cpu",
        is_compiled=config.train.compile,
        cp_method=config.layout.cp_method,
        scatters_each=config.layout.shards_add_each == "microbatch",
        trained=trained,
    )


def adapter_degrees(config: RunConfig) -> dict[str, int]:
    """Return the axes that cannot cut the adapters of a run, with degree 1."""
    if not config.lora.rank:
        return {}
    alone = {"workers": 0, "stages": (), "replicas": ()}
    rest = config.model, config.train, config.data.sequence_length, config.module_cuts
    trained = {row.positions[0] for row in adapter_shardings(config.model, config.lora).values()}
    is_bare = not trained.issuperset(range(config.model.layers))  # a stage may have no adapter
    return ({"pp": 1} if is_bare else {}) | {
        axis: 1
        for axis in ("pp", "cp", "tp")
        if find_impossible_degrees(config.layout.model_copy(update={**alone, axis: 2}), *rest)
    }


def _trained_share(config: RunConfig) -> float:
    """Return the share of the decoder's parameters that a run trains: with adapters, their number
    over the decoder's."""
    if not config.lora.rank:
        return 1.0
    adapters = sum(row.size for row in lora_parameters(config.model, config.lora))
    return adapters / max(1, count_parameters(config.model))


def _block(model: ModelConfig, number: int, kept: KeptByRuntime, options: BlockOptions) -> Layer:
    window = model.window if number in model.windowed else 0
    feed = FeedForward(model.ffn_dim)
    if model.has_experts(number) and model.experts is not None:
        kind, inner = model.experts, model.inner_dim
        feed = FeedForward(inner, experts=kind.count, top_k=kind.top_k, shared=inner * kind.shared)
    fused = not options.softcap
    heads = Heads(model.heads, model.kv_heads, model.head_size, window=window, is_fused=fused)
    found = block(model.dim, heads, feed, kept=kept)
    cut, held = found.cut_kept, found.held_kept
    query = model.heads * model.head_size
    if options.has_documents:
        cut += query
    if options.adapters is not None:  # a frozen product keeps no input
        names = options.adapters.blocks[number]
        is_joined = options.has_documents and "attention.o" not in names
        cut -= query * is_joined + model.ffn_dim * ("ffn.down" not in names)
        held -= model.dim * (names.isdisjoint(QUERY_KEY_VALUE) + names.isdisjoint(GATE_UP))
        held += options.adapters.rank * len(names)
    return replace(found, cut_kept=cut, held_kept=held)


def unmodelled_key(config: RunConfig) -> tuple[str, str]:
    """Return the key that keeps a run from the cost model, with its value, and the reason; "" twice
    if the model knows the run."""
    layout = config.layout
    if config.task.name:
        return f"task.name {config.task.name}", "the shapes of its layers are not known"
    if layout.replicas:
        return "layout.replicas", "the run file says what each replica is"
    if layout.is_asynchronous:
        return f"layout.schedule {layout.schedule}", "its curve depends on layout.pp"
    if config.outer.is_on:
        return config.apart_key, "learners exchange once in a round"
    if config.server.is_on:
        return config.apart_key, "a step has several updates"
    return "", ""
