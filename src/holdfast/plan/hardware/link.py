"""The time of messages and collectives on one kind of link (the alpha-beta model; Hockney, 1994).

A ring of n ranks sends 2(n-1) messages of S/n bytes one after the other for an all-reduce
(Patarasuk and Yuan, 2009). A ring is as slow as its slowest link.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """latency_s: seconds of an empty message. bandwidth: bytes a second of one rank, one way."""

    latency_s: float
    bandwidth: float

    def message_s(self, size: float) -> float:
        """Seconds of one message of `size` bytes."""
        return self.latency_s + size / self.bandwidth

    def allreduce_s(self, size: float, ranks: int) -> float:
        """Seconds of a ring's all-reduce of `size` bytes over so many ranks."""
        return 2 * (ranks - 1) * self.message_s(size / ranks)

    def shared_by(self, groups: float) -> Link:
        """The link as one of several groups sees it that use it at once."""
        return Link(self.latency_s, self.bandwidth / max(1.0, groups))
