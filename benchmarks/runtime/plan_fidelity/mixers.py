"""Parts of blocks that only published models have: the project trains none of them.

Low-rank attention is of DeepSeek-V2 (2024), the scan of Mamba-2 (Dao and Gu, 2024).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdfast.plan.cost.blocks import Part
from holdfast.plan.cost.workload import Attention, ExpertGroup, Layer, Product

SCAN_CHUNK = 128
"""Tokens of a chunk of Mamba-2's scan: inside, it computes like attention."""


@dataclass(frozen=True)
class LowRank:
    """Attention with low-rank projections. Queries and keys have `turned` more elements than
    values: attention computes their mean."""

    heads: int
    size: int  # elements of a head's value
    query_rank: int  # width of the projection of queries; 0: none
    kv_rank: int
    turned: int  # elements of a head with rotary positions

    def part(self, dim: int) -> Part:
        key, value = self.size + self.turned, self.size
        queries = self.heads * key
        into = (
            (Product(dim, self.query_rank), Product(self.query_rank, queries, "columns"))
            if self.query_rank
            else (Product(dim, queries, "columns"),)
        )
        return Part(
            (
                *into,
                Product(dim, self.kv_rank + self.turned),
                Product(self.kv_rank, self.heads * (self.size + value), "columns"),
                Product(self.heads * value, dim, "rows"),
            ),
            Attention(self.heads, self.heads, (key + value) // 2),
            whole_parameters=self.query_rank + self.kv_rank,
            whole_moved=2 * (self.query_rank + self.kv_rank),
            cut_moved=3 * queries,
            kernels=10,
            cut_kept=2 * queries + 2 * self.heads * value,
        )


@dataclass(frozen=True)
class Scan:
    """A Mamba-2 mixer."""

    heads: int
    size: int
    groups: int
    state: int  # elements of a channel's state

    def part(self, dim: int) -> Part:
        inner, states = self.heads * self.size, 2 * self.groups * self.state
        # a token meets half of its chunk, and the state twice, as it would meet keys
        return Part(
            (Product(dim, 2 * inner + states + self.heads, "columns"), Product(inner, dim, "rows")),
            Attention(self.heads, self.groups, self.size, SCAN_CHUNK // 2 + self.state, False),
            whole_parameters=4 * (inner + states) + 3 * self.heads + inner,
            # The convolution and its copies, five kernels of the scan with states in fp32, the
            # norm. The backward repeats the scan: a third more of what all passes move.
            cut_moved=4 / 3 * (4 * (inner + states) + 9 * inner) + 3 * inner,
            kernels=10,
            cut_kept=4 * inner + states,
        )


def joined(layer: Layer) -> Layer:
    """Return a block in which products with the same input are one product, as in Megatron."""
    experts = layer.experts
    if experts is not None:
        experts = replace(experts, products=_joined(experts.products))
    return replace(layer, products=_joined(layer.products), experts=experts)


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


def with_biases(layer: Layer) -> Layer:
    """Return a block whose products and norms have biases."""
    biases = sum(product.outputs for product in layer.products) + layer.reductions * layer.width
    return replace(
        layer,
        whole_parameters=layer.whole_parameters + biases,
        cut_moved=layer.cut_moved + _bias_moves(layer.experts),
    )


def _bias_moves(experts: ExpertGroup | None) -> float:
    """Elements moved for a token to add biases: grouped products have no place for them."""
    if experts is None:
        return 0.0
    return 2.0 * experts.top_k * sum(product.outputs for product in experts.products)
