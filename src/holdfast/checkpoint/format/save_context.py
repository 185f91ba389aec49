"""A save's knowledge of its run: table, Topology, extents."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.sharding.state_table import StateTable
from holdfast.layout import Topology

SMALLEST_EXTENT = 64 * 2**10


@dataclass(frozen=True)
class Plan:
    """The common properties of all checkpoints of one generation."""

    generation: int
    topology: Topology
    table: StateTable
    config_hash: str
    dataset_version: str
    extent_bytes: int


def fitting_extent(limit: int, state_bytes: int) -> int:
    """Bytes under one checksum: at most `limit`, and so that a state has some ten thousand.

    Small extents let a rank of another layout read little more than its boxes. A manifest takes 35
    bytes for each. Hashing and checking cost a microsecond of Python a piece.
    """
    size = SMALLEST_EXTENT
    while size * 2**16 < state_bytes:
        size *= 2
    return min(limit, size)
