"""Bytes on the ranks of one stage in closed form: the coarse resolution, for a search.

`estimate.py` is the fine one. It counts a run file tensor by tensor, which takes 1,000 times as
long. Both take the bytes of logits and of reduced gradients from `pass_memory.py`. The peaks of 40
drawn runs differ by 0.1 % at the median (`python -m
benchmarks.runtime.plan_fidelity.stage_memory`).

A rank holds state, and what microbatches in flight keep. On top of that comes the fullest of these
moments, each with what the current pass keeps:

    head      the end of the forward pass: logits, their softmax and gradient
    block     a block's backward: what is run again, gradients inside the feed-forward
    unit      shards reduce the gradients of a block, with ZeRO 2 or 3
    root      the same of what is outside of the blocks; nothing is kept then
    weights   the second half of a split backward: all gradients of a stage's weights
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise

from holdfast.config.sections.pipeline_schedules import SCHEDULE_KINDS
from holdfast.core.sharding.reduction_tree import deal, piece_sizes
from holdfast.plan.cost.choice import Choice, ReplicaChoice
from holdfast.plan.cost.pipeline_time import late_passes
from holdfast.plan.cost.workload import Layer, StateBytes, Workload
from holdfast.plan.memory.pass_memory import FRAGMENTATION, logits_bytes, reduce_bytes

_LOOKED_AT = 32  # replicas whose shares are counted

_SCORES = 2.5
"""Elements kept of each score by an attention without a fused kernel (Korthikanti et al., 2022).
They are its softmax, what dropout left of it, and half of one for the mask."""


@dataclass(frozen=True)
class MemoryOverhead:
    """What a device holds that is no tensor."""

    fragmentation: float = FRAGMENTATION  # share of what is not state
    context: float = 0.0  # bytes of the driver, of kernels and of communicators


ASSUMED_OVERHEAD = MemoryOverhead()


@dataclass(frozen=True)
class StageMemory:
    """Bytes of the fullest rank of a stage. buffers: parameters and gradients on their way between
    ranks, and results that are not kept."""

    weights: float
    gradients: float  # with partial sums
    optimizer: float
    activations: float  # of all passes in flight
    logits: float  # with what the loss makes of them
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
    """Parameters of a rank, before shards cut them. is_tied: a rank with both ends of the model
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
    cut = layer.cut_parameters / tp
    if layer.part_tp:
        cut = sum(layer.part_parameters(part) / layer.degree(part, tp) for part in (0, 1))
    return cut + layer.whole_parameters + experts


_Moment = tuple[float, float, float, float]
"""A moment at which much is in use. Microbatches in flight that are over by then, bytes of more
activations, of logits, and of what the pass works with."""


Late = tuple[tuple[str, int, int, int], int]
"""Arguments of `late_passes`, and an index on pp."""


def late_at(choice: Choice, group: ReplicaChoice, index: int) -> Late | None:
    """Return where passes wait between the halves of a split backward; None without one."""
    if group.pp == 1 or not SCHEDULE_KINDS[choice.schedule].splits_backward:
        return None
    return (choice.schedule, group.pp, choice.virtual, group.microbatches), index


@dataclass(frozen=True, slots=True)
class StageBytes:
    """Bytes that the fullest rank of a stage holds, for any number of microbatches in flight; see
    `StageMemory`."""

    weights: float
    gradients: float
    optimizer: float
    messages: float  # buffers of all moments
    overhead: MemoryOverhead
    each: float  # of one microbatch in flight
    moments: tuple[_Moment, ...]  # when much is in use; the fullest counts
    split: float  # of gradients in the second half of a split backward
    late: float  # of a microbatch between the halves
    chunk: float  # the share of a microbatch in one chunk

    def at(self, in_flight: float, late: Late | None) -> StageMemory:
        """in_flight: microbatches whose activations ranks keep; those of a chunk count as a
        share. late: see `late_at`."""
        _, activations, logits, working = self._fullest(in_flight, late)
        buffers = working + self.messages
        state = self.weights, self.gradients, self.optimizer
        return StageMemory(*state, activations, logits, buffers, self.overhead)

    def peak(self, in_flight: float, late: Late | None) -> float:
        """Return the peak of `at`."""
        passing = self._fullest(in_flight, late)[0] + self.messages
        state = self.weights + self.gradients + self.optimizer
        return self.overhead.context + state + passing * (1 + self.overhead.fragmentation)

    def _fullest(self, in_flight: float, late: Late | None) -> _Moment:
        """Bytes of all together, of activations, of logits, and of what the pass works with."""
        most, found, each = -1.0, (0.0, 0.0, 0.0, 0.0), self.each
        for over, more, logits, working in self.moments:
            activations = (in_flight - over) * each + more
            total = activations + logits + working
            if total > most:
                most, found = total, (total, activations, logits, working)
        if late is None or in_flight * max(each, self.late) + self.split <= most:
            return found  # it is not the fullest moment, whatever passes are late
        table, index = late
        passes = min(in_flight, max(self.chunk, late_passes(*table)[index]))
        activations = (in_flight - passes) * each + passes * self.late
        total = activations + self.split
        return (total, activations, 0.0, self.split) if total > most else found


def stage_bytes(
    workload: Workload,
    choice: Choice,
    group: ReplicaChoice,
    index: int,
    shape: StageShape,
    overhead: MemoryOverhead = ASSUMED_OVERHEAD,
) -> StageBytes:
    """shape: of all layers that the ranks at `index` on pp hold."""
    stage = _Stage(workload, choice, group, index, shape)
    if not workload.loses_pieces:
        overhead = MemoryOverhead(0.0, overhead.context)
    state, own, copies = workload.state, shape.parameters, stage.copies()
    # a rank's part, where ranks share them
    with_same = max(1, group.token_shares // choice.ep)
    cut = (own - shape.experts) / group.dp_shard + shape.experts / with_same
    zero = choice.zero if group.is_sharded else 1
    weights = own * state.weights
    if workload.trained < 1:
        zero = min(zero, 2)  # the frozen base is on each rank, whatever shards there are
    if zero == 3:
        weights = 0.0 if state.has_masters else cut * state.weights
    elif zero == 2 and not state.has_masters:
        weights += cut * state.weights
    summed = (cut if zero >= 2 else own) * state.gradients
    chunks = len(group.stages) // group.pp if group.stages else 1
    return StageBytes(
        weights,
        summed * copies.sums,
        cut * (state.optimizer - moved_to_host(state, choice, group)),
        summed * copies.arrivals + stage.messages(),
        overhead,
        stage.each,
        tuple(stage.moments()),
        workload.item * own / chunks,
        stage.item * shape.late,
        1 / chunks,
    )


def moved_to_host(state: StateBytes, choice: Choice, group: ReplicaChoice) -> float:
    """Bytes of a parameter's optimizer state that are on the host. ZeRO 2 and 3 keep the fp32
    parameters on the device: they are the shards."""
    if "optimizer" not in choice.host:
        return 0.0
    has_shards = choice.zero >= 2 and group.is_sharded and state.has_masters
    return state.optimizer * (2 / 3 if has_shards else 1)


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
    others = sum(p.outputs for p in layer.products if p.cut != "columns")
    return layer.width / cut + columns + others


def late_elements(layer: Layer, tp: int) -> float:
    """Elements of a token between the two halves of a split backward. They are the inputs of
    products, of which some have one in common, and the gradients of their outputs."""
    if layer.kind != "block":
        return float(layer.width)
    columns = sum(p.outputs / tp for p in layer.products if p.cut == "columns")
    rows = sum(p.outputs + p.inputs / tp for p in layer.products if p.cut == "rows")
    return columns + rows + 2 * layer.width


@dataclass(frozen=True)
class StageShape:
    """What layers need on a rank, whatever the shards, the microbatch and the ZeRO stage are. After
    the parameters, in elements of a token. The block is the largest kind."""

    parameters: float  # of all layers
    experts: float  # parameters of their experts
    unit: float  # parameters of the block
    root: float  # parameters outside of blocks
    kept: float  # of all layers
    block_kept: float  # of the block, with recompute
    block_all: float  # of the block, without
    inner: float  # its widest result
    late: float  # between the two halves of a split backward
    width: float  # of what layers hand on
    has_head: bool

    @staticmethod
    def of(
        workload: Workload, layers: Held, tp: int, ep: int, is_cut: bool, word: str
    ) -> StageShape:
        """is_cut: sequence parallelism. word: of recompute."""
        blocks = [layer for layer, _ in layers if layer.kind == "block"]
        every = blocks or [layer for layer, _ in layers]
        block = max(every, key=lambda layer: layer_parameters(layer, tp, ep))
        parameters = rank_parameters(layers, tp, ep, workload.is_tied)
        inside = rank_parameters([pair for pair in layers if pair[0].kind == "block"], tp, ep)

        def kept(layer: Layer, word: str) -> float:
            return kept_elements(workload, layer, tp, is_cut, word)

        return StageShape(
            parameters,
            expert_parameters(layers, tp, ep),
            layer_parameters(block, tp, ep),
            parameters - inside,
            sum(number * kept(layer, word) for layer, number in layers),
            kept(block, word),
            kept(block, "none"),
            max((p.outputs for p in block.products if p.cut == "columns"), default=0) / tp,
            sum(number * late_elements(layer, tp) for layer, number in layers),
            layers[0][0].width / (tp if is_cut else 1),
            layers[-1][0].kind == "head",
        )


@dataclass(slots=True)
class _Stage:
    """What the ranks at one index on pp hold."""

    workload: Workload
    choice: Choice
    group: ReplicaChoice
    index: int
    shape: StageShape
    tokens: float = field(init=False)  # of a rank's microbatch
    item: float = field(init=False)  # bytes of an element of each token
    each: float = field(init=False)  # bytes that a microbatch in flight keeps

    def __post_init__(self) -> None:
        group, shape = self.group, self.shape
        samples = self.choice.microbatch * self.workload.sequence
        self.tokens = samples / group.token_shares
        self.item = self.tokens * self.workload.item
        self.each = self.item * shape.kept + (0.0 if shape.has_head else self.item * shape.width)

    def copies(self) -> GradientCopies:
        if not self.workload.sums_in_tree:
            return GradientCopies()
        group, zero = self.group, self.choice.zero
        ranks = group.cp * (group.dp_shard if zero < 2 else 1)
        replicas = self.choice.number_of_replicas
        return gradient_copies(self.choice.microbatches, replicas, ranks)

    def moments(self) -> Iterator[_Moment]:
        """The moments at which most is in use."""
        shape, choice, group, item = self.shape, self.choice, self.group, self.item
        stream = item * shape.width
        gathered = self.workload.state.weights if choice.zero == 3 and group.is_sharded else 0.0
        root, unit = gathered * shape.root, gathered * shape.unit
        again = item * max(0.0, shape.block_all - shape.block_kept)
        yield 0.0, again, 0.0, stream + 2 * item * shape.inner + root + 2 * unit
        if shape.has_head:
            cut = group.tp if choice.sequence_parallel else 1
            yield 0.0, 0.0, self._logits(), 2 * stream * cut + root + unit
        if choice.zero >= 2 and group.is_sharded:
            yield 0.0, -item * shape.block_kept, 0.0, root + unit + self._reducing(shape.unit)
            yield 1.0, 0.0, 0.0, root + self._reducing(shape.root)

    def messages(self) -> float:
        """Bytes of messages with the stages before and after."""
        if self.group.pp == 1:
            return 0.0
        before = self.index > 0 or len(self.group.stages) > self.group.pp
        return self.item * self.shape.width * (2 * before + (not self.shape.has_head))

    def _reducing(self, elements: float) -> float:
        """Bytes while gradients are reduced."""
        state = self.workload.state
        return reduce_bytes(elements, state.weights, state.gradients, self.group.dp_shard)

    def _logits(self) -> float:
        """Bytes of logits, with what is made of them."""
        workload, tp = self.workload, self.group.tp
        rows = workload.vocabulary / tp
        if not workload.logits_at_once:
            return self.tokens * rows * (4 + workload.item)
        chunk = max(64, workload.logits_at_once // max(1, workload.vocabulary))
        width = self.shape.width * (tp if self.choice.sequence_parallel else 1)
        head = rows * width if workload.trained == 1 else 0.0  # a frozen head has no gradient
        is_fused = workload.is_compiled and tp == 1
        return logits_bytes(self.tokens, chunk, rows, head, workload.item, is_fused=is_fused)


@dataclass(frozen=True)
class GradientCopies:
    """In parts of all gradients that a rank sums."""

    sums: float = 1.0  # the sum and partial ones
    arrivals: float = 0.0  # pieces of other ranks


def gradient_copies(microbatches: int, replicas: int, ranks: int) -> GradientCopies:
    """Count the copies of the fullest rank.

    Args:
        microbatches: of a step, all replicas together.
        replicas: those that share them.
        ranks: of one replica that sum the same gradients.
    """
    sums, mean, fewest = _pieces(microbatches, replicas)
    members = replicas * ranks
    arriving = members * mean - fewest
    return GradientCopies(sums, arriving / members if members > 1 else 0.0)


@lru_cache(maxsize=4096)
def _pieces(microbatches: int, replicas: int) -> tuple[float, float, int]:
    """Copies that the fullest replica sums, and the mean and the least number of pieces."""
    pieces = [piece_sizes(microbatches, *share) for share in _shares(microbatches, replicas)]
    # of the largest piece, partial sums at once without its own: the depth of a binary counter
    deepest = (max(0, (max(own) - 1).bit_length() - 1) if own else 0 for own in pieces)
    depths = zip(pieces, deepest, strict=True)
    sums = max((len(own) + depth for own, depth in depths if own), default=1)
    numbers = [len(own) for own in pieces]
    return float(sums), sum(numbers) / len(numbers), min(numbers)


def _shares(microbatches: int, replicas: int) -> Sequence[tuple[int, int]]:
    """The first leaf of each replica's share and the one after it; of many replicas, those of some
    that stand for all."""
    if replicas <= _LOOKED_AT:
        ends = [0, *accumulate(map(len, deal(microbatches, replicas)))]
        return list(pairwise(ends))
    some = (number * replicas // _LOOKED_AT for number in range(_LOOKED_AT))
    return [(n * microbatches // replicas, (n + 1) * microbatches // replicas) for n in some]
