"""Filling boxes: every byte to its place, each extent read once and checked, wherever it goes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from obstore.store import MemoryStore
from xxhash import xxh3_128_hexdigest

from holdfast.checkpoint.memory.arena import Arena
from holdfast.checkpoint.restore.read_plan import (
    ByteMove,
    ReadRange,
    as_byte_array,
    copy_into_places,
    plan_ranges,
    split_buffered,
)
from holdfast.checkpoint.restore.reader import Checkpoint, ReadPool
from holdfast.checkpoint.restore.sources import FallbackReader, MappedSource, StoreSource
from holdfast.core.format.manifest import Blob, commit_key
from holdfast.core.sharding.boxes import Box
from holdfast.core.sharding.state_table import StateTable, TensorSpec
from holdfast.errors import CorruptError
from holdfast.wire.store.bucket import BucketStore
from holdfast.wire.store.run_store import FolderStore, MissingKeyError
from holdfast.wire.store.vectored_io import group_buffers
from tests.support.mover_process import Start, Workers, assert_reads, topology

KEY = "data/blob"


class Plain:
    """A store of one object, which reads into one buffer at a time; counts what it is asked for."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.requests: list[tuple[int, int]] = []

    def read_into(self, key: str, start: int, out: memoryview) -> None:
        self.requests.append((start, start + len(out)))
        if start + len(out) > len(self.content):
            raise MissingKeyError(f"{key} is shorter")
        out[:] = self.content[start : start + len(out)]


class Scattering(Plain):
    def scatter(self, key: str, start: int, outs: Sequence[memoryview]) -> None:
        whole = memoryview(bytearray(sum(map(len, outs))))
        self.read_into(key, start, whole)
        copy_into_places(outs, 0, whole)


def blob_of(content: bytes, extent: int) -> Blob:
    sums = [xxh3_128_hexdigest(content[i : i + extent]) for i in range(0, len(content), extent)]
    return Blob(KEY, len(content), 0, extent, tuple(sums))


def content_of(size: int) -> bytes:
    return np.random.default_rng(size).bytes(size)


def filled(
    content: bytes,
    extent: int,
    wanted: Sequence[tuple[int, int]],
    limit: int,
    stores: list[Plain],
    buffered: int = 10**9,
) -> FallbackReader:
    """Fill a target for each wanted range, and compare."""
    blob = blob_of(content, extent)
    targets = [np.zeros(stop - start, np.uint8) for start, stop in wanted]
    moves = [
        (blob, ByteMove(start, stop - start, target, 0))
        for (start, stop), target in zip(wanted, targets, strict=True)
    ]
    mixed = FallbackReader([StoreSource(store, f"store {i}") for i, store in enumerate(stores)])
    work = split_buffered(plan_ranges(moves, lambda blob: limit), buffered)
    assert all(one.is_direct or one.length <= max(buffered, extent) for one in work)
    ReadPool(mixed, 2).read(work, lambda: None)
    for (start, stop), target in zip(wanted, targets, strict=True):
        assert target.tobytes() == content[start:stop], (start, stop)
    return mixed


def extents_of(wanted: Sequence[tuple[int, int]], extent: int) -> set[int]:
    return {n for start, stop in wanted for n in range(start // extent, -(-stop // extent))}


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_any_ranges_are_filled_and_each_extent_is_read_once(data: st.DataObject) -> None:
    """Edges inside extents, gaps, neighbours, many in one extent, one over many extents."""
    size, extent = data.draw(st.integers(1, 400)), data.draw(st.integers(1, 70))
    limit = data.draw(st.sampled_from([0, 1, 50, 100, 1000]))
    buffered = data.draw(st.sampled_from([1, 60, 1000]))
    ends = sorted(data.draw(st.sets(st.integers(0, size), min_size=2, max_size=40)))
    keep = data.draw(st.lists(st.booleans(), min_size=len(ends), max_size=len(ends)))
    wanted = [pair for pair, kept in zip(pairwise(ends), keep, strict=False) if kept]
    content = content_of(size)
    for store in (Plain(content), Scattering(content)):
        filled(content, extent, wanted, limit, [store], buffered)
        read = sorted(store.requests)
        assert all(a[1] <= b[0] for a, b in pairwise(read)), "an extent is read twice"
        due = sum(min(extent, size - n * extent) for n in extents_of(wanted, extent))
        assert sum(stop - start for start, stop in read) == due


@pytest.mark.parametrize("kind", [Plain, Scattering])
def test_bytes_that_two_boxes_want_are_read_once(kind: type[Plain]) -> None:
    content = content_of(300)
    store = kind(content)
    filled(content, 32, [(0, 200), (10, 40), (40, 300), (199, 200)], 64, [store])
    assert sum(stop - start for start, stop in store.requests) == 300


@pytest.mark.parametrize("kind", [Plain, Scattering])
@pytest.mark.parametrize("wanted", [[(0, 300)], [(5, 90), (90, 170), (200, 299)]])
def test_a_rotten_extent_comes_from_the_next_source(
    kind: type[Plain], wanted: list[tuple[int, int]]
) -> None:
    """Each of them in turn, in the middle of a target, over two targets, next to a gap."""
    content = content_of(300)
    for at in range(0, 300, 16):
        rotten = bytearray(content)
        rotten[at] ^= 1
        mixed = filled(content, 16, wanted, 1000, [kind(bytes(rotten)), kind(content)])
        read = at // 16 in extents_of(wanted, 16)
        assert [p[0] for p in mixed.stats.problems] == ["store 0"] * read
    with pytest.raises(CorruptError, match="checksum does not match"):
        filled(content, 16, [(0, 300)], 1000, [kind(bytes(rotten)), kind(bytes(rotten))])


@pytest.mark.parametrize("kind", [Plain, Scattering])
def test_what_a_source_has_not_comes_from_the_next(kind: type[Plain]) -> None:
    content = content_of(300)
    mixed = filled(content, 16, [(3, 290)], 100, [kind(content[:150]), Scattering(content)])
    assert mixed.stats.bytes_by_source == {"store 0": 96, "store 1": 204}
    with pytest.raises(MissingKeyError):
        filled(content, 16, [(3, 290)], 100, [kind(content[:150])])


def test_few_places_are_read_into_and_many_are_not() -> None:
    blob = blob_of(content_of(4096), 64)
    buffer = memoryview(bytearray(4096))
    target = np.zeros(4096, np.uint8)
    some = ReadRange(blob, 1, 4, [ByteMove(70, 10, target, 0), ByteMove(80, 100, target, 200)])
    places = some.places(buffer)
    assert places is not None
    assert [len(place) for place in places] == [6, 10, 100, 76]
    assert [place.obj is target for place in places] == [False, True, True, False]
    many = ReadRange(blob, 0, 64, [ByteMove(8 * i, 4, target, 4 * i) for i in range(500)])
    assert many.places(buffer) is None


def test_a_file_that_ends_early_and_many_places(tmp_path: object) -> None:
    store = FolderStore(str(tmp_path))
    content = content_of(5000)
    store.create(KEY, content)
    outs = [memoryview(bytearray(length)) for length in [0, 1, 2, 1] * 1000]
    store.scatter(KEY, 7, outs)
    assert b"".join(outs) == content[7:4007]
    with pytest.raises(CorruptError, match="ends at byte 5000, 5001"):
        store.scatter(KEY, 4000, [memoryview(bytearray(900)), memoryview(bytearray(101))])


def test_a_bucket_fills_several_places_in_one_request() -> None:
    store = BucketStore(MemoryStore(), "here")
    content = content_of(5000)
    store.create(KEY, content)
    outs = [memoryview(bytearray(length)) for length in (0, 1, 3000, 2)]
    store.scatter(KEY, 7, outs)
    assert b"".join(outs) == content[7:3010]
    with pytest.raises(CorruptError, match="ends at byte 5000, 7003"):
        store.scatter(KEY, 4000, outs)
    with pytest.raises(MissingKeyError):
        store.scatter("data/none", 0, outs)


def test_room_is_cut_into_requests() -> None:
    outs = [memoryview(bytearray(length)) for length in (3, 0, 10, 4)]
    assert [[len(out) for out in group] for group in group_buffers(outs, 5)] == [
        [3, 2],
        [5],
        [3, 2],
        [2],
    ]


TABLE: StateTable = (
    TensorSpec("model.wide", "F32", (64, 2048), 0),
    TensorSpec("model.tall", "BF16", (999, 33), 0),
    TensorSpec("model.scale", "F64", (), None),
)


BOXES = {
    "rows": [Box("model.wide", (3,), (50,)), Box("model.tall", (1,), (997,))],
    "columns": [Box("model.wide", (0, 700), (64, 900)), Box("model.tall", (0, 30), (999, 3))],
    "empty": [
        Box("model.wide", (64, 0), (0, 2048)),
        Box("model.scale", (), ()),
        Box("model.tall", (5, 33), (3, 0)),
    ],
}


@pytest.mark.parametrize("kind", BOXES)
def test_memory_that_rots_is_made_good_from_the_disk(start: Start, kind: str) -> None:
    """From a real mover's memory, in place and by a copy; one extent of it comes from the disk."""
    mover = start(extent_bytes=16384)
    topo = topology(dp_shard=2)
    client = mover.begin(topo, TABLE)
    Workers(client, topo, TABLE).commit(4)
    boxes = [
        Box(box.name, (*box.offsets, 0)[:2], (*box.lengths, spec.shape[1])[:2])
        if spec.shape
        else box
        for box in BOXES[kind]
        for spec in TABLE
        if spec.name == box.name
    ]
    holdings = client.holdings(commit_key(1, 4))
    memory = MappedSource(holdings.slots)
    mixed = FallbackReader([memory, StoreSource(mover.store)])
    assert_reads(Checkpoint(mixed, holdings.commit), boxes, 4, TABLE)
    assert set(mixed.stats.bytes_by_source) == {"memory"}
    blob = holdings.commit.writers[0].blob
    fd, slot, _ = holdings.slots[blob.key]
    arena = Arena(fd)
    arena.memory[arena.data_offset(slot) + blob.data_start + 9 * 8192] ^= 1
    arena.memory[arena.data_offset(slot) + blob.data_start + 5] ^= 1
    assert_reads(Checkpoint(mixed, holdings.commit), boxes, 4, TABLE)
    if kind != "empty":
        assert {source for source, _, _ in mixed.stats.problems} == {"memory"}
        assert 0 < mixed.stats.bytes_by_source["run store"] <= 2 * 16384
    memory.close()


def test_a_flat_view_shows_the_bytes_themselves() -> None:
    out = bytearray(8)
    as_byte_array(memoryview(out).cast("I"))[5] = 7
    assert out[5] == 7
