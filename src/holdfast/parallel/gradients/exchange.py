"""What a way of exchanging pieces and sums is given, and what it offers to a reducer."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor

from holdfast.parallel.comm.trace import REDUCE
from holdfast.parallel.gradients.buckets import FlatLayout, GradientBucket
from holdfast.parallel.gradients.cell_team import CellTeam

Slot = tuple[int, int]
"""(piece, 0) is where a piece ends up; (0, depth) with depth > 0 a partial sum above it."""


class ExchangeHost(Protocol):
    """The reducer whose pieces are exchanged.

    gradient: [layout.size], where the sums belong; also the first piece. is_summed: set before
    anything of the step is summed here, or received.
    """

    team: CellTeam
    layout: FlatLayout
    gradient: Tensor
    fast: bool
    is_summed: bool

    def slot(self, slot: Slot) -> Tensor:
        """The flat buffer of a slot."""
        ...

    def scratch(self, key: Hashable, elements: int) -> Tensor:
        """Room for `elements`, kept between steps under `key`; its content is void."""
        ...

    def fail(self, error: Exception) -> None:
        """Store the first error of the step; wake all waiters, here and at the peers."""
        ...


class ExchangeRound(Protocol):
    """The exchange of one step of one reducer."""

    def piece_ready(self, index: int, ordinal: int) -> None:
        """Own piece number `ordinal` of bucket `index` is final."""
        ...

    def join(self) -> None:
        """Return when the exchange is over; errors are stored in the host."""
        ...

    def stop(self) -> None:
        """Let the exchange end at its next look."""
        ...


def bucket_view(flat: Tensor, bucket: GradientBucket) -> Tensor:
    """A bucket's elements of a flat buffer.  flat: [layout.size] -> [stop - start]"""
    return flat[bucket.start : bucket.stop]


def reduce_span(team: CellTeam, name: str) -> AbstractContextManager[None]:
    """Note when something of the reduction happens, if the run file asks for it."""
    return team.recorder.span(REDUCE, name) if team.recorder else nullcontext()
