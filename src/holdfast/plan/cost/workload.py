"""What a step computes, as shapes: layers, tokens, precision, and the bytes of state.

A layer is described by what one token does in it. So the same description serves any degree of tp,
cp and ep. It also serves models that the project does not train itself, like GPT blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Cut = Literal["rows", "columns", ""]
"""How tp cuts a product: its inputs (rows of the matrix), its outputs, or not at all."""


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
    """Of one layer. window: tokens that one attends to; 0: all before it. is_fused: scores stay on
    the chip. Kernels that are not fused compute the causal half too, which is then masked."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int = 0
    is_causal: bool = True
    is_fused: bool = True

    def keys(self, sequence: int) -> float:
        """Keys that a token is computed with, on average."""
        within = min(self.window or sequence, sequence)
        is_half = self.is_causal and self.is_fused
        return within * (1 - within / sequence / 2) if is_half else float(within)


@dataclass(frozen=True)
class ExpertGroup:
    """Experts of one layer. products: those of one expert. A token is computed by `top_k`.
    is_fused: one kernel computes a product of all experts, the activation and the rounding."""

    count: int
    top_k: int
    products: tuple[Product, ...]
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
    """One layer; kind: "embedding", "block", "head", as tables name it.

    width: elements of a token between layers. table_parameters: of a table that tp cuts and nothing
    multiplies, the embedding. whole_parameters: those that tp does not cut, like norms. moved:
    elements of a token that the forward's kernels without a product read and write. `whole_moved`:
    in kernels that tp does not cut (sequence parallelism does); `cut_moved`: in those that it cuts.
    kernels: their launches. reductions: sums over the tp group of `width` elements a token, in the
    forward pass. kept: elements of a token that the backward pass needs, split in the same way;
    held_kept: those that each rank of tp has.
    """

    kind: str
    width: int
    products: tuple[Product, ...] = ()
    attention: Attention | None = None
    experts: ExpertGroup | None = None
    table_parameters: int = 0
    whole_parameters: int = 0
    whole_moved: float = 0.0
    cut_moved: float = 0.0
    kernels: int = 0
    reductions: int = 0
    whole_kept: float = 0.0
    cut_kept: float = 0.0
    held_kept: float = 0.0

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
    """Bytes of each parameter: weights as they are computed with, gradients as they are summed, and
    the optimizer's own (fp32 weights and moments). touched: read and written by an update; 0: as
    by a fused kernel."""

    weights: float = 2.0
    gradients: float = 4.0
    optimizer: float = 12.0
    touched: float = 0.0

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
    """layers: in order, the embedding first and the head last. sequence: tokens of a sample.
    batch: samples of a step. item: bytes of an element between kernels. vocabulary: for the
    logits. is_tied: the head is the embedding's table. logits_at_once: elements of a chunk of them;
    0: there are no chunks. sums_in_tree: gradients of microbatches are summed in the order of a
    binary tree, which needs partial sums. loses_pieces: free memory lies in pieces, as on an
    accelerator. repeats_all: full recomputation repeats the complete forward pass, as Megatron
    does; torch leaves out each layer's last product. is_compiled: kernels are fused. cp_method: a
    word of `layout.cp_method`. scatters_each: with ZeRO 2, shards sum the gradients of each
    microbatch, not once a step."""

    name: str
    layers: tuple[Layer, ...]
    sequence: int
    batch: int
    precision: str = "bf16"
    item: float = 2.0
    state: StateBytes = StateBytes()
    vocabulary: int = 0
    is_tied: bool = False
    logits_at_once: int = 0
    sums_in_tree: bool = False
    loses_pieces: bool = True
    repeats_all: bool = False
    is_compiled: bool = True
    cp_method: str = "allgather"
    scatters_each: bool = False

    @property
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

    def counts(self, start: int, stop: int) -> dict[int, int]:
        """Kinds, by index in `kinds`, of blocks [start, stop), with their number."""
        before, after = self._kinds_before[start], self._kinds_before[stop]
        return {k: b - a for k, (a, b) in enumerate(zip(before, after, strict=True)) if b > a}

    @cached_property
    def _counts_of(self) -> dict[tuple[int, int, bool, bool], tuple[tuple[int, int], ...]]:
        return {}

    def counts_of(
        self, start: int, stop: int, is_first: bool, is_last: bool
    ) -> tuple[tuple[int, int], ...]:
        """Kinds of a pipeline stage with blocks [start, stop), with their number. The first stage
        has the embedding, the last one the head."""
        key = (start, stop, is_first, is_last)
        if key not in self._counts_of:
            ends = [(0, 1)] if is_first else []
            head = [(len(self.kinds) - 1, 1)] if is_last else []
            self._counts_of[key] = (*ends, *self.counts(start, stop).items(), *head)
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
    """Seconds of one layer and one microbatch on one device. again: what recomputation runs
    again before the backward. gather_s, scatter_s: collectives of shards that the passes may
    hide. Communication of tp, cp and ep is inside `forward`, `inputs` and `weights`, and again in
    `communication`, by axis, in the sum of the three."""

    forward: float
    inputs: float
    weights: float
    again: float = 0.0
    communication: Mapping[str, float] | None = None
    update: float | None = None

    @property
    def backward(self) -> float:
        return self.again + self.inputs + self.weights
