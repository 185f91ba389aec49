"""The places of a checkpoint's boxes, derived only for the boxes requested.

A commit object lists no boxes; listing all of them would cost a large run seconds at every start. A
rank that restores needs few: only the writers that can hold a part of those are looked at.
"""

from __future__ import annotations

from holdfast.core.format.manifest import Blob, Commit, PlacedBox, place_boxes_as
from holdfast.core.sharding.boxes import Box
from holdfast.core.sharding.ownership import Ownership


class BoxIndex:
    """The stored boxes of one commit. What a writer holds is derived once, when first needed."""

    def __init__(self, commit: Commit) -> None:
        self._ownership = Ownership(commit.topology, commit.table)
        self._blobs = {writer.rank: writer.blob for writer in commit.writers}
        self._specs = {spec.name: spec for spec in commit.table}
        self._dtypes = {spec.name: spec.dtype for spec in commit.table}
        self._boxes_by_rank: dict[int, dict[str, PlacedBox]] = {}

    def boxes_of_rank(self, rank: int) -> tuple[PlacedBox, ...]:
        """Contents of a writer's blob, in the order of its bytes."""
        return place_boxes_as(self._ownership.boxes(rank), self._dtypes)

    def find_stored(self, box: Box) -> list[tuple[PlacedBox, Blob]]:
        """The stored boxes that hold a part of a box, and the blobs that they are in."""
        found: list[tuple[PlacedBox, Blob]] = []
        for rank in self._ownership.owners(box, self._specs[box.name]):
            if rank not in self._boxes_by_rank:
                self._boxes_by_rank[rank] = {p.box.name: p for p in self.boxes_of_rank(rank)}
            held = self._boxes_by_rank[rank].get(box.name)
            if held is not None and held.box.overlaps(box):
                found.append((held, self._blobs[rank]))
        return found
