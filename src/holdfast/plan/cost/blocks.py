"""Blocks of decoders as shapes, from the numbers that a model's configuration states.

The same functions describe the project's own decoders and published models that it does not train.
`benchmarks/runtime/plan_fidelity/mixers.py` has the mixers that only those have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from holdfast.plan.cost.workload import Attention, ExpertGroup, Layer, Product

_FEED_KEPT = {True: 4, False: 2}
"""Inner units that a feed-forward keeps, for each of its width: with a gate, and without."""

_GATE_AGAIN = 1
"""Of those with a gate, what the compiler computes again: the activation of the gate. Peaks of
`python -m benchmarks.runtime.gpu --only plan` with two, four and eight samples differ by that."""


@dataclass(frozen=True)
class Part:
    """What one part adds to its block: fields of `Layer`."""

    products: tuple[Product, ...] = ()
    attention: Attention | None = None
    experts: ExpertGroup | None = None
    whole_parameters: int = 0
    whole_moved: float = 0.0
    cut_moved: float = 0.0
    kernels: int = 0
    cut_kept: float = 0.0
    held_kept: float = 0.0


class Mixer(Protocol):
    """The part of a block that mixes tokens."""

    def part(self, dim: int) -> Part: ...


@dataclass(frozen=True)
class Heads:
    """Attention."""

    count: int
    kv: int
    size: int
    window: int = 0
    is_fused: bool = True

    def part(self, dim: int) -> Part:
        queries, keys = self.count * self.size, self.kv * self.size
        columns = tuple(Product(dim, width, "columns") for width in (queries, keys, keys))
        return Part(
            (*columns, Product(queries, dim, "rows")),
            Attention(self.count, self.kv, self.size, self.window, is_fused=self.is_fused),
            cut_moved=2 * (queries + keys),
            kernels=6,
            cut_kept=2 * (queries + keys + self.count),  # and the scores' sums, in fp32
        )


@dataclass(frozen=True)
class FeedForward:
    """The dense part of a block, or its experts."""

    inner: int  # width of the dense layer or of one expert
    is_gated: bool = True
    experts: int = 0
    top_k: int = 0
    shared: int = 0  # inner width of the part next to experts that computes every token
    latent: int = 0  # width in which experts compute; 0: the model's
    is_fused: bool = False  # as of `ExpertGroup`; the exchange sorts a token's copies then


@dataclass(frozen=True)
class KeptByRuntime:
    """How much a runtime keeps for the backward pass. holds_inputs: a product's input is held
    complete on each rank of tp. Otherwise sequence parallelism cuts it, and the backward pass
    gathers it again (Korthikanti et al., 2022)."""

    norms: float = 1.0  # elements for each one of a norm's input
    holds_inputs: bool = False
    masks: float = 0.0  # elements for each one that a part gives; 0.5 for a byte of dropout
    is_compiled: bool = False  # what a fused kernel can compute again is not kept


def block(
    dim: int, mixer: Mixer | None, feed: FeedForward | None, kept: KeptByRuntime = KeptByRuntime()
) -> Layer:
    """Return a block; hybrid models have blocks with only one of the two parts."""
    mixing = mixer.part(dim) if mixer else Part()
    feeding = _feed(dim, feed, kept.is_compiled) if feed else Part()
    parts = (mixing, feeding)
    number = (mixer is not None) + (feed is not None)
    # of each part: the norm reads and writes, the sum reads twice and writes
    return Layer(
        "block",
        dim,
        mixing.products + feeding.products,
        mixing.attention,
        feeding.experts,
        whole_parameters=number * dim + sum(p.whole_parameters for p in parts),
        whole_moved=5 * number * dim + sum(p.whole_moved for p in parts),
        cut_moved=sum(p.cut_moved for p in parts),
        kernels=sum(p.kernels for p in parts),
        reductions=number,
        whole_kept=number * dim * (kept.norms + kept.masks + (not kept.holds_inputs)),
        cut_kept=sum(p.cut_kept for p in parts),
        held_kept=number * dim * kept.holds_inputs + sum(p.held_kept for p in parts),
        mixer=len(mixing.products),
    )


def embedding(dim: int, rows: int, positions: int = 0) -> Layer:
    """Return the table of tokens, and of positions where a model learns them."""
    return Layer(
        "embedding",
        dim,
        table_parameters=rows * dim,
        whole_parameters=positions * dim,
        whole_moved=2 * dim,
        kernels=1,
        reductions=1,
    )


def head(dim: int, rows: int, kept: KeptByRuntime = KeptByRuntime()) -> Layer:
    """Return the last norm, the logits, and the loss in fp32: of a logit it reads and writes 4, 4,
    and 2 bytes."""
    return Layer(
        "head",
        dim,
        (Product(dim, rows, "columns"),),
        whole_parameters=dim,
        whole_moved=2 * dim,
        cut_moved=5 * rows,
        kernels=4,
        reductions=1,
        whole_kept=dim * (kept.norms + (not kept.holds_inputs)),
        held_kept=dim * kept.holds_inputs,
    )


def _feed(dim: int, kind: FeedForward, is_compiled: bool = False) -> Part:
    width = 3 if kind.is_gated else 2
    if not kind.experts:
        units = _FEED_KEPT[kind.is_gated] - _GATE_AGAIN * (is_compiled and kind.is_gated)
        return Part(
            _feed_products(dim, kind.inner, kind.is_gated),
            cut_moved=width * kind.inner,
            kernels=4,
            cut_kept=units * kind.inner,
        )
    space = kind.latent or dim
    products = [Product(dim, kind.experts)]
    products += [Product(dim, space), Product(space, dim)] if kind.latent else []
    products += _feed_products(dim, kind.shared, kind.is_gated) if kind.shared else ()
    computed = kind.top_k * kind.inner + kind.shared
    own = kind.shared if kind.is_fused else computed
    # a token's copies are sorted, and summed again: each is read and written
    inside = _feed_products(space, kind.inner, kind.is_gated)
    return Part(
        tuple(products),
        None,
        ExpertGroup(kind.experts, kind.top_k, inside, kind.is_fused),
        whole_moved=(2 if kind.is_fused else 4) * kind.top_k * space,
        cut_moved=width * own,
        kernels=16,
        cut_kept=_FEED_KEPT[kind.is_gated] * computed,
        held_kept=2 * kind.top_k * space + 2 * kind.experts,
    )


def _feed_products(dim: int, inner: int, is_gated: bool) -> tuple[Product, ...]:
    into = Product(dim, inner, "columns")
    return (into,) * (2 if is_gated else 1) + (Product(inner, dim, "rows"),)
