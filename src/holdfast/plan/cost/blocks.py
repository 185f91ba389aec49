"""Blocks of decoders as shapes, from the numbers that a model's configuration states.

The same functions describe the project's own decoders and published models that it does not train.
Those have low-rank attention (DeepSeek-V2, 2024), Mamba-2 (Dao and Gu, 2024), or experts in a
narrower space.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdfast.plan.cost.workload import Attention, ExpertGroup, Layer, Product

SCAN_CHUNK = 128
"""Tokens of a chunk of Mamba-2's scan: inside, it computes like attention."""


_FEED_KEPT = {True: 4, False: 2}
"""Inner units that a feed-forward keeps, for each of its width: with a gate, and without."""

_GATE_AGAIN = 1
"""Of those with a gate, what the compiler computes again: the activation of the gate. Peaks of
`python -m benchmarks.runtime.gpu --only plan` with two, four and eight samples differ by that."""


@dataclass(frozen=True)
class Heads:
    """Attention. query_rank, kv_rank: widths of low-rank projections; 0: none. turned: elements of
    a head with rotary positions, which low-rank attention adds to `size`."""

    count: int
    kv: int
    size: int
    query_rank: int = 0
    kv_rank: int = 0
    turned: int = 0
    window: int = 0
    is_fused: bool = True


@dataclass(frozen=True)
class Scan:
    """A Mamba-2 mixer. state: elements of a channel's state."""

    heads: int
    size: int
    groups: int
    state: int


@dataclass(frozen=True)
class FeedForward:
    """inner: width of the dense layer or of one expert. shared: inner width of the part next to
    experts that computes every token. latent: width in which experts compute; 0: the model's.
    is_fused: as of `ExpertGroup`; the exchange sorts a token's copies then."""

    inner: int
    is_gated: bool = True
    experts: int = 0
    top_k: int = 0
    shared: int = 0
    latent: int = 0
    is_fused: bool = False


@dataclass(frozen=True)
class KeptByRuntime:
    """How much a runtime keeps for the backward pass. norms: elements for each one of a norm's
    input. holds_inputs: a product's input is held complete on each rank of tp. Otherwise sequence
    parallelism cuts it, and the backward pass gathers it again (Korthikanti et al., 2022). masks:
    elements for each one that attention or feed-forward gives; 0.5 for a byte of dropout.
    is_compiled: what a fused kernel can compute again is not kept."""

    norms: float = 1.0
    holds_inputs: bool = False
    masks: float = 0.0
    is_compiled: bool = False


@dataclass(frozen=True)
class _Part:
    products: tuple[Product, ...] = ()
    attention: Attention | None = None
    experts: ExpertGroup | None = None
    whole_parameters: int = 0
    whole_moved: float = 0.0
    cut_moved: float = 0.0
    kernels: int = 0
    cut_kept: float = 0.0
    held_kept: float = 0.0


def block(
    dim: int,
    mixer: Heads | Scan | None,
    feed: FeedForward | None,
    has_biases: bool = False,
    kept: KeptByRuntime = KeptByRuntime(),
    is_joined: bool = False,
) -> Layer:
    """Return a block; hybrid models have blocks with only one of the two parts.

    is_joined: products with the same input are one product, as in Megatron.
    """
    mixing = _mixer(dim, mixer)
    feeding = _feed(dim, feed, kept.is_compiled) if feed else _Part()
    parts = (mixing, feeding)
    number = (mixer is not None) + (feed is not None)
    products = mixing.products + feeding.products
    experts = feeding.experts
    if is_joined:
        products = _joined(products)
        experts = experts and replace(experts, products=_joined(experts.products))
    biases, added = 0, 0.0
    if has_biases:
        biases = sum(p.outputs for p in products) + number * dim
        added = _bias_moves(experts)
    # of each part: the norm reads and writes, the sum reads twice and writes
    return Layer(
        "block",
        dim,
        products,
        mixing.attention,
        experts,
        whole_parameters=number * dim + biases + sum(p.whole_parameters for p in parts),
        whole_moved=5 * number * dim + sum(p.whole_moved for p in parts),
        cut_moved=added + sum(p.cut_moved for p in parts),
        kernels=sum(p.kernels for p in parts),
        reductions=number,
        whole_kept=number * dim * (kept.norms + kept.masks + (not kept.holds_inputs)),
        cut_kept=sum(p.cut_kept for p in parts),
        held_kept=number * dim * kept.holds_inputs + sum(p.held_kept for p in parts),
    )


def _bias_moves(experts: ExpertGroup | None) -> float:
    """Elements moved for a token to add biases: grouped products have no place for them."""
    if experts is None:
        return 0.0
    return 2.0 * experts.top_k * sum(product.outputs for product in experts.products)


def _joined(products: tuple[Product, ...]) -> tuple[Product, ...]:
    """Join neighbours that read the same input."""
    found = list[Product]()
    for each in products:
        last = found[-1] if found else None
        if last is not None and each.cut == "columns" == last.cut and each.inputs == last.inputs:
            found[-1] = replace(last, outputs=last.outputs + each.outputs)
        else:
            found.append(each)
    return tuple(found)


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


def _mixer(dim: int, mixer: Heads | Scan | None) -> _Part:
    if isinstance(mixer, Scan):
        return _scan(dim, mixer)
    if mixer is None:
        return _Part()
    return _low_rank(dim, mixer) if mixer.kv_rank else _attention(dim, mixer)


def _attention(dim: int, kind: Heads) -> _Part:
    queries, keys = kind.count * kind.size, kind.kv * kind.size
    return _Part(
        (
            Product(dim, queries, "columns"),
            Product(dim, keys, "columns"),
            Product(dim, keys, "columns"),
            Product(queries, dim, "rows"),
        ),
        Attention(kind.count, kind.kv, kind.size, kind.window, is_fused=kind.is_fused),
        cut_moved=2 * (queries + keys),
        kernels=6,
        cut_kept=2 * (queries + keys + kind.count),  # and the scores' sums, in fp32
    )


def _low_rank(dim: int, kind: Heads) -> _Part:
    """Queries and keys have `turned` more elements than values: attention computes their mean."""
    key, value = kind.size + kind.turned, kind.size
    queries = kind.count * key
    into = (
        (Product(dim, kind.query_rank), Product(kind.query_rank, queries, "columns"))
        if kind.query_rank
        else (Product(dim, queries, "columns"),)
    )
    return _Part(
        (
            *into,
            Product(dim, kind.kv_rank + kind.turned),
            Product(kind.kv_rank, kind.count * (kind.size + value), "columns"),
            Product(kind.count * value, dim, "rows"),
        ),
        Attention(kind.count, kind.count, (key + value) // 2),
        whole_parameters=kind.query_rank + kind.kv_rank,
        whole_moved=2 * (kind.query_rank + kind.kv_rank),
        cut_moved=3 * queries,
        kernels=10,
        cut_kept=2 * queries + 2 * kind.count * value,
    )


def _scan(dim: int, kind: Scan) -> _Part:
    inner, states = kind.heads * kind.size, 2 * kind.groups * kind.state
    # a token meets half of its chunk, and the state twice, as it would meet keys
    return _Part(
        (Product(dim, 2 * inner + states + kind.heads, "columns"), Product(inner, dim, "rows")),
        Attention(kind.heads, kind.groups, kind.size, SCAN_CHUNK // 2 + kind.state, False),
        whole_parameters=4 * (inner + states) + 3 * kind.heads + inner,
        # The convolution and its copies, five kernels of the scan with states in fp32, the norm.
        # The backward repeats the scan: a third more of what all passes move.
        cut_moved=4 / 3 * (4 * (inner + states) + 9 * inner) + 3 * inner,
        kernels=10,
        cut_kept=4 * inner + states,
    )


def _feed(dim: int, kind: FeedForward, is_compiled: bool = False) -> _Part:
    width = 3 if kind.is_gated else 2
    if not kind.experts:
        units = _FEED_KEPT[kind.is_gated] - _GATE_AGAIN * (is_compiled and kind.is_gated)
        return _Part(
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
    return _Part(
        tuple(products),
        None,
        ExpertGroup(
            kind.experts,
            kind.top_k,
            _feed_products(space, kind.inner, kind.is_gated),
            kind.is_fused,
        ),
        whole_moved=(2 if kind.is_fused else 4) * kind.top_k * space,
        cut_moved=width * own,
        kernels=16,
        cut_kept=_FEED_KEPT[kind.is_gated] * computed,
        held_kept=2 * kind.top_k * space + 2 * kind.experts,
    )


def _feed_products(dim: int, inner: int, is_gated: bool) -> tuple[Product, ...]:
    into = Product(dim, inner, "columns")
    return (into,) * (2 if is_gated else 1) + (Product(inner, dim, "rows"),)
