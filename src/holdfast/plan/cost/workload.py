"""What a step computes, as shapes: layers, tokens, precision, and the bytes of state.

A layer is described by what one token does in it. So the same description serves any degree of tp,
cp and ep. It also serves models that the project does not train itself, like GPT blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from holdfast.layout import component_degree

Cut = Literal["rows", "columns", ""]
"""How tp cuts a product: its inputs (rows of the matrix), its outputs, or not at all."""
TpDegrees = tuple[int, ...]
"""Ranks of tp that share attention, and those that share a feed-forward; (): all share both."""
Counts = tuple[tuple[int, int], ...]
"""Kinds of layers, by their index in the workload, with their number."""
SLOWED = 0.126
"""Share of a collective's time that it adds to simultaneous computing (Galvatron: 1.126). Its
kernels take multiprocessors and memory bandwidth."""


@dataclass(frozen=True)
class Product:
    """A matrix product that each token takes part in, before tp cuts it."""

    inputs: int
    outputs: int
    cut: Cut = ""

    @property
    def parameters(self) -> int:
        return self.inputs * self.outputs


@dataclass(frozen=True)
class Attention:
    """Of one layer. Kernels that are not fused compute the causal half too, which is masked."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int = 0  # tokens that one attends to; 0: all before it
    is_causal: bool = True
    is_fused: bool = True  # scores stay on the chip

    def keys(self, sequence: int) -> float:
        """Keys that a token is computed with, on average."""
        within = min(self.window or sequence, sequence)
        is_half = self.is_causal and self.is_fused
        return within * (1 - within / sequence / 2) if is_half else float(within)


@dataclass(frozen=True)
class ExpertGroup:
    """Experts of one layer. is_fused: one kernel computes a product of all experts, the activation
    and the rounding."""

    count: int
    top_k: int  # experts that compute a token
    products: tuple[Product, ...]  # of one expert
    is_fused: bool = False

    @property
    def width(self) -> int:
        """Elements of a token that experts get."""
        return self.products[0].inputs

    @property
    def parameters(self) -> int:
        """Of all experts."""
        return self.count * sum(product.parameters for product in self.products)


@dataclass(frozen=True)
class Layer:
    """One layer. moved: elements of a token that the forward's kernels without a product read and
    write. kept: elements of a token that the backward pass needs. Those that begin with `whole` are
    not cut by tp (sequence parallelism cuts them), those with `cut` are."""

    kind: str  # "embedding", "block", "head", as tables name it
    width: int  # elements of a token between layers
    products: tuple[Product, ...] = ()
    attention: Attention | None = None
    experts: ExpertGroup | None = None
    table_parameters: int = 0  # of the embedding: tp cuts it, and nothing multiplies it
    whole_parameters: int = 0  # like those of norms
    whole_moved: float = 0.0
    cut_moved: float = 0.0
    kernels: int = 0  # launches of those kernels
    reductions: int = 0  # sums over tp of `width` elements a token, in the forward pass
    whole_kept: float = 0.0
    cut_kept: float = 0.0
    held_kept: float = 0.0  # those that each rank of tp has
    mixer: int = 0  # products of attention: the first ones
    part_tp: TpDegrees = ()  # ranks of tp that share attention, and the feed-forward; (): all

    def part(self, product: int) -> int:
        """The part of a block that a product belongs to: 0 attention, 1 feed-forward."""
        return int(product >= self.mixer)

    def degree(self, part: int, tp: int) -> int:
        """Return how many ranks of tp share a part of the block."""
        return component_degree(self.part_tp[part], tp) if self.part_tp else tp

    def part_parameters(self, part: int) -> int:
        """Return the parameters of the products of a part."""
        each = enumerate(self.products)
        return sum(product.parameters for i, product in each if self.part(i) == part)

    @cached_property
    def cut_parameters(self) -> int:
        """Parameters that tp cuts, without experts."""
        return self.table_parameters + sum(product.parameters for product in self.products)

    @cached_property
    def parameters(self) -> int:
        """All parameters of the layer."""
        experts = self.experts.parameters if self.experts else 0
        return self.cut_parameters + self.whole_parameters + experts


@dataclass(frozen=True)
class StateBytes:
    """Bytes of each parameter."""

    weights: float = 2.0  # as they are computed with
    gradients: float = 4.0  # as they are summed
    optimizer: float = 12.0  # its own: fp32 weights and moments
    touched: float = 0.0  # read and written by an update; 0: as by a fused kernel

    @property
    def updated(self) -> float:
        """Bytes that an update reads and writes."""
        return self.touched or 2 * self.optimizer + self.gradients + self.weights

    @property
    def has_masters(self) -> bool:
        """The optimizer has weights of its own, of which those that it computes with are a copy."""
        return self.weights < self.gradients


@dataclass(frozen=True)
class Workload:
    """A step. sums_in_tree: gradients of microbatches are summed in the order of a binary tree,
    which needs partial sums. repeats_all: full recomputation repeats the complete forward pass, as
    Megatron does; torch leaves out each layer's last product."""

    name: str
    layers: tuple[Layer, ...]  # in order, the embedding first and the head last
    sequence: int  # tokens of a sample
    batch: int  # samples of a step
    precision: str = "bf16"
    item: float = 2.0  # bytes of an element between kernels
    state: StateBytes = StateBytes()
    vocabulary: int = 0  # for the logits
    is_tied: bool = False  # the head is the embedding's table
    logits_at_once: int = 0  # elements of a chunk of logits; 0: there are no chunks
    sums_in_tree: bool = False
    loses_pieces: bool = True  # free memory lies in pieces, as on an accelerator
    repeats_all: bool = False
    is_compiled: bool = True  # kernels are fused
    cp_method: str = "allgather"  # a word of `layout.cp_method`
    scatters_each: bool = False  # ZeRO 2: shards sum gradients for each microbatch, not once a step
    trained: float = 1.0  # share of the parameters that have gradients; the rest is frozen

    @property
    def part_tp(self) -> TpDegrees:
        """The degrees of blocks' parts, which all blocks have in common."""
        return next((layer.part_tp for layer in self.layers if layer.part_tp), ())

    def with_part_tp(self, degrees: TpDegrees) -> Workload:
        """The same with degrees for the parts of its blocks."""
        layers = (
            replace(layer, part_tp=degrees) if layer.kind == "block" else layer
            for layer in self.layers
        )
        return replace(self, layers=tuple(layers))

    @cached_property
    def blocks(self) -> tuple[Layer, ...]:
        """The layers that pipeline stages share out."""
        return self.layers[1:-1]

    @cached_property
    def kinds(self) -> tuple[Layer, ...]:
        """The different layers, the embedding first and the head last."""
        return tuple(dict.fromkeys(self.layers))

    @cached_property
    def kinds_of_blocks(self) -> tuple[int, ...]:
        """The kind of each block, by its index in `kinds`."""
        index = {kind: number for number, kind in enumerate(self.kinds)}
        return tuple(index[block] for block in self.blocks)

    @cached_property
    def _kinds_before(self) -> tuple[tuple[int, ...], ...]:
        """[block]: how many blocks of each kind come before it."""
        rows = [[0] * len(self.kinds)]
        for kind in self.kinds_of_blocks:
            rows.append(list(rows[-1]))
            rows[-1][kind] += 1
        return tuple(map(tuple, rows))

    @cached_property
    def _counts_of(self) -> dict[tuple[int, int, bool, bool], Counts]:
        return {}

    def counts_of(self, start: int, stop: int, is_first: bool, is_last: bool) -> Counts:
        """Kinds of a pipeline stage with blocks [start, stop), with their number. The first stage
        has the embedding, the last one the head."""
        key = (start, stop, is_first, is_last)
        if key not in self._counts_of:
            pairs = zip(self._kinds_before[start], self._kinds_before[stop], strict=True)
            inside = [(kind, b - a) for kind, (a, b) in enumerate(pairs) if b > a]
            ends, head = [(0, 1)] * is_first, [(len(self.kinds) - 1, 1)] * is_last
            self._counts_of[key] = (*ends, *inside, *head)
        return self._counts_of[key]

    @cached_property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers) - self.is_tied * (
            self.layers[-1].cut_parameters
        )

    @property
    def step_tokens(self) -> int:
        return self.batch * self.sequence


@dataclass(frozen=True)
class PassTimes:
    """Seconds of one layer and one microbatch on one device. Communication of tp, cp and ep is
    inside `forward`, `inputs` and `weights`, and again in `communication`, in the sum of them."""

    forward: float
    inputs: float
    weights: float
    again: float = 0.0  # what recomputation runs again before the backward
    communication: Mapping[str, float] | None = None  # by axis
    update: float | None = None

    @property
    def backward(self) -> float:
        return self.again + self.inputs + self.weights

    def with_collectives(self, forward_s: float, backward_s: float, hides: float) -> PassTimes:
        """Return the passes, longer by what they do not hide of so many seconds of collectives.

        While a layer computes, the parameters of the next one are gathered, and gradients of the
        one before are summed. hides: see `DeviceType.hides`.
        """
        forward = _added(self.forward, forward_s, hides)
        backward = _added(self.backward, backward_s, hides)
        sent = {**(self.communication or {}), "shards": forward + backward}
        longer = {"forward": self.forward + forward, "inputs": self.inputs + backward}
        return replace(self, **longer, communication=sent)


def _added(computing_s: float, sending_s: float, hides: float) -> float:
    hidden_s = min(sending_s * hides, computing_s)
    return sending_s - hidden_s + SLOWED * hidden_s
