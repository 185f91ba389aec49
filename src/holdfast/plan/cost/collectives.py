"""Seconds of collectives on one kind of link; sizes in bytes of the complete tensor.

Rings (Patarasuk and Yuan, 2009), with the latency of each of their messages.
"""

from __future__ import annotations

from holdfast.plan.hardware.link import Link


def allreduce_s(link: Link, size: float, ranks: int) -> float:
    """All ranks end with the sum."""
    return link.allreduce_s(size, ranks) if ranks > 1 else 0.0


def gather_s(link: Link, size: float, ranks: int) -> float:
    """All ranks end with the complete tensor of `size` bytes, of which each had a part."""
    return (ranks - 1) * link.message_s(size / ranks) if ranks > 1 else 0.0


def scatter_s(link: Link, size: float, ranks: int) -> float:
    """Each rank ends with its part of the sum of tensors of `size` bytes."""
    return gather_s(link, size, ranks)


def all_to_all_s(link: Link, size: float, ranks: int) -> float:
    """Each rank sends an equal part of its `size` bytes to each other rank."""
    return (ranks - 1) * link.message_s(size / ranks) if ranks > 1 else 0.0
