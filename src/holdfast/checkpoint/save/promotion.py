"""Parts of a step that only other machines' memory holds, as input of a durable save.

A generation may begin from a step that neither the run store nor an arena of this node has. Its
parts are then read from the peers, extent by extent and each checked, straight into the run store.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from xxhash import xxh3_128_hexdigest

from holdfast.checkpoint.restore.sources import FallbackReader, MemorySource
from holdfast.core.format.manifest import Blob, Commit, PartManifest
from holdfast.errors import HoldfastError
from holdfast.wire.store.run_store import MissingKeyError


def find_parts(
    memories: Sequence[MemorySource], commit: Commit, ranks: Collection[int]
) -> list[tuple[PartManifest, bytes]]:
    """The sealed manifests of these ranks, as some memory has them and the commit object names
    them. Raises MissingKeyError for a rank whose manifest no memory has."""
    if not ranks:
        return []
    due = {writer.part_xxh3: writer.rank for writer in commit.writers if writer.rank in ranks}
    found: dict[int, tuple[PartManifest, bytes]] = {}
    for memory in memories:
        try:
            lines = memory.inventory()
        except HoldfastError:
            continue  # that machine is out of reach
        for line in lines:
            rank = due.get(xxh3_128_hexdigest(line.sealed_manifest))
            if rank is not None:
                part = PartManifest.from_bytes(line.sealed_manifest, f"{memory.name}, rank {rank}")
                found.setdefault(rank, (part, line.sealed_manifest))
    missing = sorted(set(ranks) - set(found))
    if missing:
        raise MissingKeyError(f"no mover has the parts of ranks {missing} any more")
    return [found[rank] for rank in sorted(found)]


def read_checked(memories: Sequence[MemorySource], blob: Blob) -> Iterator[memoryview]:
    """A blob's bytes; each view holds until the next one is asked for. Raises as Mixed does."""
    mixed = FallbackReader(memories)
    buffer = memoryview(bytearray(min(blob.extent_bytes, blob.size)))
    for extent in blob.extents():
        for _, view in mixed.read_extents(blob, [extent], buffer):
            yield view
