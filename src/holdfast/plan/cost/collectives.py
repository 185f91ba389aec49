"""Seconds of collectives on one kind of link; sizes in bytes of the complete tensor.

Rings (Patarasuk and Yuan, 2009) send the least, and have the latency of each of their messages.
Two binary trees (Sanders et al., 2009) send a little more in logarithmically many messages. A sum
takes the way that is faster, as NCCL does. Gathers and scatters are rings. The third way, first
inside nodes, is a layout's own: shards inside and replicas between.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

from holdfast.plan.hardware.link import Link


def allreduce_s(link: Link, size: float, ranks: int) -> float:
    """All ranks end with the sum, by the faster of two ways."""
    return min(link.allreduce_s(size, ranks), tree_s(link, size, ranks)) if ranks > 1 else 0.0


def tree_s(link: Link, size: float, ranks: int) -> float:
    """All ranks end with the sum: up two trees that each have half of the tensor, and down."""
    return 2 * ceil(log2(ranks)) * link.latency_s + 2 * size / link.bandwidth


def gather_s(link: Link, size: float, ranks: int) -> float:
    """All ranks end with the complete tensor of `size` bytes, of which each had a part. The
    reverse takes as long: each rank ends with its part of a sum."""
    return (ranks - 1) * link.message_s(size / ranks) if ranks > 1 else 0.0


@dataclass(frozen=True)
class Exchange:
    """Links of the all-to-all of ranks that share experts; `near` of them are in one node.

    By the sender's own network card each token goes once to each node that has experts of it. From
    there it goes to ranks inside (DeepEP; Zhao et al., 2025). Both happen at once.
    """

    ranks: int
    near: int
    inside: Link
    outside: Link

    def seconds(self, size: float, top_k: int) -> float:
        """Seconds to send `size` bytes of tokens, each to `top_k` experts chosen evenly."""
        if self.ranks == 1:
            return 0.0
        nodes = self.ranks / self.near
        within = size * _met(top_k, self.ranks) * (self.near - 1) / self.near
        across = size * _met(top_k, nodes) * (nodes - 1) / nodes
        inside = (self.near - 1) * self.inside.latency_s + within / self.inside.bandwidth
        outside = (nodes - 1) * self.outside.latency_s + across / self.outside.bandwidth
        return max(inside, outside)


def _met(top_k: int, places: float) -> float:
    """Places that a token goes to: several of its experts may be in one."""
    return places * (1 - (1 - 1 / places) ** top_k) if places > 1 else 1.0
