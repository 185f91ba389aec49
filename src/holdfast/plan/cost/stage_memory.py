"""Bytes on the ranks of one stage, by short formulas: fast enough for a search.

`plan/memory/estimate.py` counts the same for a run file, tensor by tensor. The search uses these
formulas to leave out what cannot fit, and asks that estimate about what it is about to choose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.plan.cost.choice import Choice, ReplicaChoice
from holdfast.plan.cost.workload import Layer, Workload

FRAGMENTATION = 0.05
"""Share of what is not state that an accelerator's allocator may lose between pieces."""


@dataclass(frozen=True)
class MemoryOverhead:
    """What a device holds that is no tensor. fragmentation: share of what is not state. context:
    bytes of the driver, of kernels and of communicators."""

    fragmentation: float = FRAGMENTATION
    context: float = 0.0


ASSUMED_OVERHEAD = MemoryOverhead()


@dataclass(frozen=True)
class StageMemory:
    """Bytes of the fullest rank of a stage."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float
    overhead: MemoryOverhead = ASSUMED_OVERHEAD

    @property
    def peak(self) -> float:
        passing = self.activations + self.logits + self.buffers
        state = self.weights + self.gradients + self.optimizer
        return self.overhead.context + state + passing * (1 + self.overhead.fragmentation)


Held = Sequence[tuple[Layer, int]]
"""Layers of a stage: each kind with its number, in the order of the model."""


def rank_parameters(layers: Held, tp: int, ep: int) -> float:
    """Parameters of a rank, before dp_shard cuts them."""
    return sum(number * layer_parameters(layer, tp, ep) for layer, number in layers)


def expert_parameters(layers: Held, tp: int, ep: int) -> float:
    """Parameters of experts of a rank, which ranks with the same experts share."""
    return sum(
        number * layer.experts.parameters / tp / ep for layer, number in layers if layer.experts
    )


def layer_parameters(layer: Layer, tp: int, ep: int) -> float:
    """Of one layer, on a rank."""
    experts = layer.experts.parameters / tp / ep if layer.experts else 0
    return layer.cut_parameters / tp + layer.whole_parameters + experts


def stage_memory(
    workload: Workload,
    choice: Choice,
    group: ReplicaChoice,
    index: int,
    layers: Held,
    in_flight: float,
    overhead: MemoryOverhead = ASSUMED_OVERHEAD,
) -> StageMemory:
    """layers: all that the ranks at `index` on pp hold. in_flight: microbatches whose activations
    they keep at once; those of a chunk count as a share."""
    state, shards = workload.state, group.dp_shard
    own = rank_parameters(layers, group.tp, choice.ep)
    largest = max(layer_parameters(layer, group.tp, choice.ep) for layer, _ in layers)
    tokens = choice.microbatch * workload.sequence / group.dp_shard / group.cp
    kept = sum(
        number * kept_elements(layer, group.tp, choice.sequence_parallel, group.recompute_at(index))
        for layer, number in layers
    )
    is_last = layers[-1][0].kind == "head"
    logits = tokens * workload.vocabulary / group.tp * (4 + workload.item) if is_last else 0.0
    gathered = 2 * largest * state.weights if choice.zero == 3 and shards > 1 else 0.0
    sent = tokens * layers[0][0].width * workload.item * (2 if group.pp > 1 else 0)
    return StageMemory(
        own * state.weights / (shards if choice.zero == 3 else 1),
        own * state.gradients / (shards if choice.zero >= 2 else 1),
        0.0 if "optimizer" in choice.host else own * state.optimizer / shards,
        in_flight * kept * tokens * workload.item,
        logits,
        gathered + sent,
        overhead,
    )


def kept_elements(layer: Layer, tp: int, sequence_parallel: bool, word: str) -> float:
    """Elements of a token that a rank keeps of a layer for the backward pass."""
    cut = tp if sequence_parallel else 1
    stream = layer.width / cut
    if layer.kind != "block" or word == "none":
        return layer.whole_kept / cut + layer.cut_kept / tp
    if word == "full":
        return stream
    products = sum(p.outputs / (tp if p.cut == "columns" else cut) for p in layer.products)
    return stream + products
