"""A component of a block that fewer ranks cut than tp has: a degree of `layout.tp_by`.

With degree d of n ranks, d neighbours have one part each. There are n / d such sets of ranks, which
hold the same. Each set computes other samples of a microbatch (attention, which needs complete
ones) or other tokens (the feed-forward). So no rank computes what another one does. Gradients of
the parameters are parts, which the reduction cells add.

With sequence parallelism, the tokens of d neighbours are often exactly those that they compute. For
attention n / d must divide the samples, and n the tokens. Then they gather and scatter among
themselves. Of a microbatch of T tokens a rank sends, in a region, forward and backward,

    4 (d - 1) / n * T * D

elements, where the degree n has 4 (n - 1) / n * T * D. Otherwise a rank takes its samples or tokens
out of all of them. The region's end adds zeros for those of other ranks, and the degree saves
nothing. If n / d does not divide the samples, some sets compute fewer. One without any computes the
last sample, for nothing.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch.nn.functional as F
from torch import Tensor

from holdfast.parallel.comm.collectives import Collectives


class Region(Protocol):
    """A way into and out of a module that is computed over ranks."""

    def enter_region(self, x: Tensor) -> Tensor: ...

    def leave_region(self, x: Tensor) -> Tensor: ...


class WholeRegion(Region, Protocol):
    """That of all ranks along tp (`tensor_parallel.TensorParallel`). shape: samples, and tokens of
    each, of the microbatch under way."""

    sequence_parallel: bool
    collectives: Collectives
    shape: tuple[int, int]


class Share(NamedTuple):
    """Of some samples or tokens, those that a rank computes, and how many of them count."""

    computed: slice
    counted: int


class ComponentRegion:
    """The way into and out of one kind of component. by_sample: it needs complete samples."""

    def __init__(self, whole: WholeRegion, degree: int, *, by_sample: bool) -> None:
        ranks = whole.collectives
        self._whole, self._by_sample = whole, by_sample
        self._sets, self._set = ranks.size // degree, ranks.rank // degree
        first = self._set * degree
        self._neighbours = ranks.among(range(first, first + degree)) if degree > 1 else None

    def share(self, count: int) -> Share:
        """This rank's of `count` samples or tokens."""
        size = -(-count // self._sets)
        first = self._set * size
        counted = max(0, min(size, count - first))
        return Share(slice(min(first, count - 1), first + size), counted)

    def enter_region(self, x: Tensor) -> Tensor:
        """The residual stream, as `TensorParallel` has it -> this rank's samples [b, S, D], or
        tokens [t, D]"""
        if self._holds_its_share():
            tokens = x if self._neighbours is None else self._neighbours.gather(x)
            return tokens.unflatten(0, (-1, self._whole.shape[1])) if self._by_sample else tokens
        everything = self._whole.enter_region(x)
        rows = everything if self._by_sample else everything.flatten(0, 1)
        return rows[self.share(rows.shape[0]).computed]

    def leave_region(self, x: Tensor) -> Tensor:
        """Each rank's summand for its samples or tokens -> the residual stream"""
        batch, sequence = self._whole.shape
        if self._holds_its_share():
            tokens = x.flatten(0, 1) if self._by_sample else x
            return tokens if self._neighbours is None else self._neighbours.scatter(tokens)
        count = batch if self._by_sample else batch * sequence
        share = self.share(count)
        after = count - share.computed.start - share.counted
        beside = (0, 0) * (x.dim() - 1)
        placed = F.pad(x[: share.counted], (*beside, share.computed.start, after))
        return self._whole.leave_region(placed.view(batch, sequence, -1))

    def _holds_its_share(self) -> bool:
        """Return True if the tokens of the neighbours are those that they compute. Padding rows are
        computed with them, as zeros."""
        if not self._whole.sequence_parallel:
            return False
        batch, sequence = self._whole.shape
        is_even = batch % self._sets == 0 and batch * sequence % self._whole.collectives.size == 0
        return is_even or not self._by_sample
