"""The time of messages and of collectives on one kind of link (alpha-beta model; Hockney, 1994).

A ring of n ranks sends 2(n-1) messages of S/n bytes one after the other for an all-reduce
(Patarasuk and Yuan, 2009). A ring is as slow as its slowest link. So the share of the peak that an
all-reduce reaches follows from latency, size and ranks, and no table is needed.

Fast links cut a message into chunks, and fill a chain of buffers with them. With the best size of
chunk the chain costs time in proportion to the root of latency x transfer (`ramp`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt


@dataclass(frozen=True)
class Link:
    """latency_s: seconds of an empty message. bandwidth: bytes a second of one rank, one way, as
    large messages reach it. ramp: weight of the root term, 0 for none, 2 for one more buffer."""

    latency_s: float
    bandwidth: float
    ramp: float = 0.0

    def message_s(self, size: float) -> float:
        """Seconds of one message of `size` bytes."""
        moving = size / self.bandwidth
        return self.latency_s + moving + self.ramp * sqrt(self.latency_s * moving)

    def allreduce_s(self, size: float, ranks: int) -> float:
        """Seconds of a ring's all-reduce of `size` bytes over so many ranks."""
        return 2 * (ranks - 1) * self.message_s(size / ranks)

    def reached(self, size: float, ranks: int, peak: float) -> float:
        """Share of a peak bus bandwidth that an all-reduce reaches, as nccl-tests counts it."""
        return 2 * (ranks - 1) / ranks * size / self.allreduce_s(size, ranks) / peak

    def shared_by(self, groups: float) -> Link:
        """The link as one of several groups sees it that use it at once."""
        return replace(self, bandwidth=self.bandwidth / max(1.0, groups))
