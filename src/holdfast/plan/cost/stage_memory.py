"""Bytes on the ranks of one stage, by short formulas: fast enough for a search.

`plan/memory/estimate.py` counts the same for a run file, tensor by tensor. The search uses these
formulas to leave out what cannot fit, and asks that estimate about what it is about to choose.

A rank holds state, and what microbatches in flight keep. On top of that comes the fullest of these
moments, each with what the current pass keeps:

    head      the end of the forward pass: logits, their softmax and gradient
    block     a block's backward: what is run again, gradients inside the feed-forward
    unit      dp_shard reduces the gradients of a block, with ZeRO 2 or 3
    root      the same of what is outside of the blocks; nothing is kept then
    weights   the second half of a split backward: all gradients of a stage's weights
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from holdfast.config.pipeline_schedules import SCHEDULE_KINDS
from holdfast.plan.cost.choice import Choice, ReplicaChoice
from holdfast.plan.cost.gradient_copies import GradientCopies, gradient_copies
from holdfast.plan.cost.pipeline_time import late_passes
from holdfast.plan.cost.workload import Layer, Workload

FRAGMENTATION = 0.05
"""Share of what is not state that an accelerator's allocator may lose between pieces."""

_SCORES = 2.5
"""Elements kept of each score by an attention without a fused kernel (Korthikanti et al., 2022).
They are its softmax, what dropout left of it, and half of one for the mask."""


@dataclass(frozen=True)
class MemoryOverhead:
    """What a device holds that is no tensor. fragmentation: share of what is not state. context:
    bytes of the driver, of kernels and of communicators."""

    fragmentation: float = FRAGMENTATION
    context: float = 0.0


ASSUMED_OVERHEAD = MemoryOverhead()


@dataclass(frozen=True)
class StageMemory:
    """Bytes of the fullest rank of a stage. gradients: with partial sums. activations: of all
    passes in flight. logits: with what the loss makes of them. buffers: parameters and gradients on
    their way between ranks, and results that are not kept."""

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


def rank_parameters(layers: Held, tp: int, ep: int, is_tied: bool = False) -> float:
    """Parameters of a rank, before dp_shard cuts them. is_tied: a rank with both ends of the model
    holds their table once."""
    found = sum(number * layer_parameters(layer, tp, ep) for layer, number in layers)
    kinds = {layer.kind for layer, _ in layers}
    if is_tied and {"embedding", "head"} <= kinds:
        found -= sum(layer.cut_parameters / tp for layer, _ in layers if layer.kind == "head")
    return found


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
    stage = _Stage(workload, choice, group, index, layers)
    if not workload.loses_pieces:
        overhead = replace(overhead, fragmentation=0.0)
    state, own, cut, copies = workload.state, stage.parameters, stage.shared, stage.copies
    zero = choice.zero if group.dp_shard > 1 else 1
    weights = own * state.weights
    if zero == 3:
        weights = 0.0 if state.has_masters else cut * state.weights
    elif zero == 2 and not state.has_masters:
        weights += cut * state.weights
    summed = (cut if zero >= 2 else own) * state.gradients
    moment = max(stage.moments(in_flight), key=lambda each: each.total)
    return StageMemory(
        weights,
        summed * copies.sums,
        0.0 if "optimizer" in choice.host else cut * state.optimizer,
        moment.activations,
        moment.logits,
        moment.working + summed * copies.arrivals + stage.messages,
        overhead,
    )


def kept_elements(workload: Workload, layer: Layer, tp: int, is_cut: bool, word: str) -> float:
    """Elements of a token that a rank keeps of a layer for the backward pass. is_cut: sequence
    parallelism."""
    cut = tp if is_cut else 1
    everything = layer.whole_kept / cut + layer.cut_kept / tp + layer.held_kept
    if layer.kind != "block":
        return everything
    scores = 0.0
    if layer.attention is not None and not layer.attention.is_fused:
        scores = _SCORES * layer.attention.heads / tp * workload.sequence
    if word == "none":
        return everything + scores
    if word == "full":
        return layer.width / cut
    if scores:  # it runs attention again, of which the scores are the most
        return everything
    columns = sum(p.outputs / tp for p in layer.products if p.cut == "columns")
    return (
        layer.width / cut + columns + sum(p.outputs for p in layer.products if p.cut != "columns")
    )


def late_elements(layer: Layer, tp: int) -> float:
    """Elements of a token between the two halves of a split backward. They are the inputs of
    products, of which some have one in common, and the gradients of their outputs."""
    if layer.kind != "block":
        return float(layer.width)
    columns = sum(p.outputs / tp for p in layer.products if p.cut == "columns")
    rows = sum(p.outputs + p.inputs / tp for p in layer.products if p.cut == "rows")
    return columns + rows + 2 * layer.width


@dataclass(frozen=True)
class _Moment:
    """Bytes on top of the state."""

    activations: float = 0.0
    logits: float = 0.0
    working: float = 0.0

    @property
    def total(self) -> float:
        return self.activations + self.logits + self.working


@dataclass(frozen=True)
class _Stage:
    """What the ranks at one index on pp hold."""

    workload: Workload
    choice: Choice
    group: ReplicaChoice
    index: int
    layers: Held

    @cached_property
    def parameters(self) -> float:
        is_tied = self.workload.is_tied
        return rank_parameters(self.layers, self.group.tp, self.choice.ep, is_tied)

    @cached_property
    def shared(self) -> float:
        """A rank's part of them, where ranks share them."""
        group, ep = self.group, self.choice.ep
        experts = expert_parameters(self.layers, group.tp, ep)
        with_same = max(1, group.dp_shard * group.cp // ep)
        return (self.parameters - experts) / group.dp_shard + experts / with_same

    @property
    def copies(self) -> GradientCopies:
        if not self.workload.sums_in_tree:
            return GradientCopies()
        group, zero = self.group, self.choice.zero
        ranks = group.cp * (group.dp_shard if zero < 2 else 1)
        replicas = self.choice.number_of_replicas
        return gradient_copies(self.choice.microbatches, replicas, ranks)

    @cached_property
    def tokens(self) -> float:
        """Of a rank's microbatch."""
        group = self.group
        return self.choice.microbatch * self.workload.sequence / group.dp_shard / group.cp

    @cached_property
    def stream(self) -> float:
        """Bytes of what passes between layers."""
        cut = self.group.tp if self.choice.sequence_parallel else 1
        return self.tokens * self.layers[0][0].width * self.workload.item / cut

    @property
    def messages(self) -> float:
        """Bytes of messages with the stages before and after."""
        if self.group.pp == 1:
            return 0.0
        before = self.index > 0 or len(self.group.stages) > self.group.pp
        return self.stream * (2 * before + (not self.has_head))

    @cached_property
    def has_head(self) -> bool:
        return self.layers[-1][0].kind == "head"

    def moments(self, in_flight: float) -> Iterator[_Moment]:
        """The moments at which most is in use."""
        gathered, word = self._gathered(1), self.group.recompute_at(self.index)
        kept = self._kept(word) + (0.0 if self.has_head else self.stream)
        block = self._block
        again = self._of(block, "none") - self._of(block, word)
        inside = self.stream + 2 * self._inner + self._gathered(2)
        yield _Moment(in_flight * kept + max(0.0, again), 0.0, inside)
        if self.has_head:
            ends = 2 * self.tokens * self.layers[0][0].width * self.workload.item
            yield _Moment(in_flight * kept, self._logits(), ends + gathered)
        if self._reduces:
            before = in_flight * kept - self._of(block, word)
            yield _Moment(before, 0.0, gathered + self._reducing(self._unit))
            root = self._gathered(0) + self._reducing(self._root)
            yield _Moment((in_flight - 1) * kept, 0.0, root)
        if self.group.pp > 1 and SCHEDULE_KINDS[self.choice.schedule].splits_backward:
            late = min(in_flight, max(1.0 / self._chunks, self._late_passes))
            gradients = self.workload.item * self.parameters / self._chunks
            yield _Moment((in_flight - late) * kept + late * self._late, 0.0, gradients)

    @property
    def _late(self) -> float:
        """Bytes that the first half of a split backward leaves of a microbatch."""
        elements = sum(n * late_elements(layer, self.group.tp) for layer, n in self.layers)
        return elements * self.tokens * self.workload.item

    @property
    def _late_passes(self) -> float:
        group, choice = self.group, self.choice
        found = late_passes(choice.schedule, group.pp, choice.virtual, group.microbatches)
        return found[self.index]

    @cached_property
    def _chunks(self) -> int:
        return len(self.group.stages) // self.group.pp if self.group.stages else 1

    @cached_property
    def _block(self) -> Layer:
        """The largest kind of block; of a stage without one, its largest layer."""
        every = [layer for layer, _ in self.layers]
        blocks = [layer for layer in every if layer.kind == "block"]
        return max(blocks or every, key=self._size)

    def _size(self, layer: Layer) -> float:
        return layer_parameters(layer, self.group.tp, self.choice.ep)

    @cached_property
    def _unit(self) -> float:
        return self._size(self._block)

    @property
    def _inner(self) -> float:
        """Bytes of the widest result inside a block."""
        widest = max((p.outputs for p in self._block.products if p.cut == "columns"), default=0)
        return self.tokens * widest / self.group.tp * self.workload.item

    def _of(self, layer: Layer, word: str) -> float:
        """Bytes that a microbatch keeps of one layer."""
        choice = self.choice
        kept = kept_elements(self.workload, layer, self.group.tp, choice.sequence_parallel, word)
        return kept * self.tokens * self.workload.item

    def _kept(self, word: str) -> float:
        return sum(number * self._of(layer, word) for layer, number in self.layers)

    @property
    def _reduces(self) -> bool:
        return self.choice.zero >= 2 and self.group.dp_shard > 1

    @cached_property
    def _root(self) -> float:
        """Parameters outside of the blocks."""
        blocks = sum(n * self._size(layer) for layer, n in self.layers if layer.kind == "block")
        return self.parameters - blocks

    def _gathered(self, blocks: int) -> float:
        """Bytes of gathered parameters, with ZeRO 3: of so many blocks, and of all else."""
        if not (self.choice.zero == 3 and self.group.dp_shard > 1):
            return 0.0
        return self.workload.state.weights * (self._root + blocks * self._unit)

    def _reducing(self, elements: float) -> float:
        """Bytes while gradients are reduced: those, what is sent, and what comes."""
        state = self.workload.state
        more = state.gradients * (1 + 1 / self.group.dp_shard) * elements
        return state.gradients * elements + max(state.weights * elements, more)

    def _logits(self) -> float:
        """Bytes of a chunk of logits, in what is computed with and twice in fp32, and of the
        gradient of the head's rows."""
        workload, tp = self.workload, self.group.tp
        if not workload.logits_at_once:
            return self.tokens * workload.vocabulary / tp * (4 + workload.item)
        chunk = max(64, workload.logits_at_once // max(1, workload.vocabulary))
        tokens = min(self.tokens, chunk)
        is_mixed = workload.item < 4
        each = workload.item + 4 + (4 if is_mixed else 0)
        rows = workload.vocabulary / tp * self.layers[0][0].width
        again = self.tokens > chunk
        if again:
            each += workload.item if is_mixed else 4
        return tokens * workload.vocabulary / tp * each + rows * (4 if again else workload.item)
