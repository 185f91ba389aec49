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

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.layout import set_share
from holdfast.options.protocols import Apply
from holdfast.parallel.axes.tensor_parallel import TensorParallel


class ComponentRegion:
    """The way into and out of one kind of component. by_sample: it needs complete samples."""

    def __init__(self, whole: TensorParallel, degree: int, by_sample: bool) -> None:
        ranks = whole.collectives
        self._whole, self._by_sample = whole, by_sample
        self._sets, self._set = ranks.size // degree, ranks.rank // degree
        first = self._set * degree
        self._neighbours = ranks.among(range(first, first + degree)) if degree > 1 else None

    def exclude_from_compilation(self) -> None:
        """See `TensorParallel.exclude_from_compilation`."""
        aside: Any = torch.compiler.disable
        self.enter_region, self.leave_region = aside(self.enter_region), aside(self.leave_region)  # type: ignore[method-assign]

    def share(self, count: int) -> slice:
        """This rank's of `count` samples or tokens."""
        return set_share(count, self._sets, self._set)[0]

    def enter_region(self, x: Tensor) -> Tensor:
        """The residual stream, as `TensorParallel` has it -> this rank's samples [b, S, D], or
        tokens [t, D]"""
        if self._holds_its_share():
            tokens = x if self._neighbours is None else self._neighbours.gather(x)
            by_sample = (-1, self._whole.shape[1], x.shape[-1])
            return tokens.view(by_sample) if self._by_sample else tokens
        everything = self._whole.enter_region(x)
        rows = everything if self._by_sample else everything.flatten(0, 1)
        return rows[self.share(rows.shape[0])]

    def leave_region(self, x: Tensor) -> Tensor:
        """Each rank's summand for its samples or tokens -> the residual stream"""
        batch, sequence = self._whole.shape
        if self._holds_its_share():
            tokens = x.flatten(0, 1) if self._by_sample else x
            return tokens if self._neighbours is None else self._neighbours.scatter(tokens)
        count = batch if self._by_sample else batch * sequence
        share, counted = set_share(count, self._sets, self._set)
        beside = (0, 0) * (x.dim() - 1)
        placed = F.pad(x[:counted], (*beside, share.start, count - share.start - counted))
        return self._whole.leave_region(placed.view(batch, sequence, -1))

    def _holds_its_share(self) -> bool:
        """Return True if the tokens of the neighbours are those that they compute. Padding rows are
        computed with them, as zeros."""
        if not self._whole.sequence_parallel:
            return False
        batch, sequence = self._whole.shape
        is_even = batch % self._sets == 0 and batch * sequence % self._whole.collectives.size == 0
        return is_even or not self._by_sample


APPLY = Apply(region=ComponentRegion)
