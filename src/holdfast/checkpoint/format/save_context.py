"""A save's knowledge of its run: table, Topology, extents."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.sharding.state_table import StateTable
from holdfast.layout import Topology

MIN_EXTENT_BYTES = 64 * 2**10


@dataclass(frozen=True)
class SaveContext:
    """The common properties of all checkpoints of one generation."""

    generation: int
    topology: Topology
    table: StateTable
    config_hash: str
    dataset_version: str
    extent_bytes: int
    has_record: bool = False  # the run store had the generation's object when it began


def choose_extent_bytes(max_bytes: int, state_bytes: int) -> int:
    """Bytes under one checksum: at most `limit`, and so that a state has some ten thousand.

    Small extents let a rank of another layout read little more than its boxes. A manifest takes 35
    bytes for each. Hashing and checking cost a microsecond of Python a piece.
    """
    size = MIN_EXTENT_BYTES
    while size * 2**16 < state_bytes:
        size *= 2
    return min(max_bytes, size)
