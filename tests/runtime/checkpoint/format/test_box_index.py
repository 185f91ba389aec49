"""The stored boxes that a restore is led to are those that hold what it wants, on any layout."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint.format.box_index import BoxIndex
from holdfast.core.format.manifest import (
    Blob,
    Commit,
    WriterShare,
    blob_key,
    place_boxes,
    writer_name,
)
from holdfast.core.sharding.boxes import Box, coverage_problem
from holdfast.core.sharding.ownership import owned_boxes
from holdfast.core.sharding.state_table import local_boxes, state_table
from holdfast.layout import Topology
from tests.support.topologies import MODELS, topologies


def commit_of(topology: Topology, model: int) -> Commit:
    table = state_table(MODELS[model])
    writers = []
    for rank in range(topology.world_size):
        due = place_boxes(owned_boxes(topology, table, rank), table)
        size = 4096 + sum(p.nbytes for p in due)
        key = blob_key(1, 5, writer_name(rank))
        writers.append(WriterShare(rank, Blob(key, size, 4096, 2**30, ("0" * 32,)), "0" * 32))
    return Commit(1, 5, "", "", topology, table, tuple(writers))


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_every_wanted_box_is_covered_by_what_is_found(data: st.DataObject) -> None:
    model = data.draw(st.sampled_from(range(len(MODELS))))
    saved, restored = (
        data.draw(topologies(MODELS[model].layers)),
        data.draw(topologies(MODELS[model].layers)),
    )
    commit = commit_of(saved, model)
    index = BoxIndex(commit)
    due = {writer.blob.key: set(index.boxes_of_rank(writer.rank)) for writer in commit.writers}
    for rank in range(restored.world_size):
        for box in local_boxes(restored, commit.table, rank):
            if not box.size:
                continue
            found = index.find_stored(box)
            common = [held.box.intersect(box) for held, _ in found]
            assert all(c is not None for c in common)
            moved = [
                Box(
                    c.name,
                    tuple(a - b for a, b in zip(c.offsets, box.offsets, strict=True)),
                    c.lengths,
                )
                for c in common
                if c is not None
            ]
            assert coverage_problem(box.lengths, moved) is None
            for held, blob in found:
                assert held in due[blob.key]
