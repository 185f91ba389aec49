"""The places of a checkpoint's boxes, derived only for the boxes requested.

A commit object lists no boxes; listing all of them would cost a large run seconds at every start. A
rank that restores needs few: only the writers that can hold a part of those are looked at.
"""

from __future__ import annotations

from holdfast.core.format.manifest import Blob, Commit, Placed, placed_as
from holdfast.core.sharding.boxes import Box
from holdfast.core.sharding.ownership import Ownership


class Index:
    """The stored boxes of one commit. What a writer holds is derived once, when first needed."""

    def __init__(self, commit: Commit) -> None:
        self._ownership = Ownership(commit.topology, commit.table)
        self._blobs = {writer.rank: writer.blob for writer in commit.writers}
        self._specs = {spec.name: spec for spec in commit.table}
        self._dtypes = {spec.name: spec.dtype for spec in commit.table}
        self._due: dict[int, dict[str, Placed]] = {}

    def due(self, rank: int) -> tuple[Placed, ...]:
        """Contents of a writer's blob, in the order of its bytes."""
        return placed_as(self._ownership.boxes(rank), self._dtypes)

    def of(self, box: Box) -> list[tuple[Placed, Blob]]:
        """The stored boxes that hold a part of a box, and the blobs that they are in."""
        found: list[tuple[Placed, Blob]] = []
        for rank in self._ownership.owners(box, self._specs[box.name]):
            if rank not in self._due:
                self._due[rank] = {p.box.name: p for p in self.due(rank)}
            held = self._due[rank].get(box.name)
            if held is not None and held.box.meets(box):
                found.append((held, self._blobs[rank]))
        return found
