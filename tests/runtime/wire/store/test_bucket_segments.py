"""Journal segments in a bucket: few pieces, merged under the eyes of readers, nothing lost."""

from __future__ import annotations

import threading

import pytest

from holdfast.wire.store import bucket_segments
from holdfast.wire.store.bucket import BucketStore
from holdfast.wire.store.location import open_store
from tests.support import s3
from tests.support.s3 import Fault, Proxy, Request

KEY = "journal/0000000001/rank0.jsonl"

pytestmark = pytest.mark.usefixtures("s3_credentials")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_segments, "MERGED_PIECES", 4)
    monkeypatch.setattr(bucket_segments, "MERGED_BYTES", 40)


def _open(address: tuple[str, int], prefix: str) -> BucketStore:
    store = open_store(s3.location(address, prefix, timeout=5, retries=0))
    assert isinstance(store, BucketStore)
    return store


def _names(store: BucketStore) -> list[str]:
    return [path.rpartition("/")[2] for path, _ in sorted(store._objects.list(KEY))]


def test_pieces_become_few_objects_with_the_same_bytes() -> None:
    store = _open(s3.server(), "merged")
    content = b""
    for number in range(13):
        store.append(KEY, b"line %02d\n" % number)
        content += b"line %02d\n" % number
        assert store.get(KEY) == content
        assert store.segment_sizes("journal/") == {KEY: len(content)} == {KEY: store.size(KEY)}
    # The first object was full with seven appends: four, and then three more.
    assert _names(store) == [
        ".piece-0000000000-0000000006",
        ".piece-0000000007-0000000010",
        ".piece-0000000011",
        ".piece-0000000012",
    ]
    out = bytearray(20)
    store.read_into(KEY, 50, memoryview(out))
    assert out == content[50:70]
    assert store.list("journal/") == [KEY]
    again = _open(s3.server(), "merged")
    again.append(KEY, b"of a restarted writer\n")
    assert again.get(KEY) == content + b"of a restarted writer\n"
    again.delete(KEY)
    assert again.list("") == []


def test_a_merge_that_fails_loses_nothing_and_is_tried_again(proxy: Proxy) -> None:
    store = _open(proxy.address, "failing")
    proxy.rule = lambda r: (
        Fault(503) if r.method == "PUT" and "piece-0000000000-" in r.key else None
    )
    for number in range(5):
        store.append(KEY, b"%d" % number)
    assert len(_names(store)) == 5
    proxy.rule = lambda r: Fault(503) if s3.removes(r) else None
    store.append(KEY, b"5")
    proxy.rule = lambda request: None
    assert len(_names(store)) == 7
    assert store.get(KEY) == b"012345"
    store.append(KEY, b"6")
    assert _names(store) == [".piece-0000000000-0000000006"]
    assert store.get(KEY) == b"0123456"


def test_a_reader_that_meets_a_merge_reads_every_byte(proxy: Proxy) -> None:
    writer, reader = _open(s3.server(), "met"), _open(proxy.address, "met")
    for number in range(3):
        writer.append(KEY, b"%d" % number)

    def merge(request: Request) -> None:
        proxy.rule = lambda later: None
        writer.append(KEY, b"3")

    # Between the reader's listing and its reading
    proxy.rule = lambda r: merge(r) if "piece-" in r.key else None
    assert reader.get(KEY) == b"0123"
    assert reader.segment_sizes("journal/") == {KEY: 4}
    for number in range(4, 7):
        writer.append(KEY, b"%d" % number)
    out = bytearray(4)
    reader.read_into(KEY, 0, memoryview(out))  # by the pieces of the last listing
    assert out == b"0123"


def test_many_readers_while_a_writer_appends() -> None:
    writer, reader = _open(s3.server(), "many"), _open(s3.server(), "many")
    writer.append(KEY, b"0\n")
    ended = threading.Event()

    def write() -> None:
        for number in range(1, 40):
            writer.append(KEY, b"%d\n" % number)
        ended.set()

    thread = threading.Thread(target=write)
    thread.start()
    lengths = []
    while not ended.is_set():
        lines = reader.get(KEY).split()
        assert lines == [b"%d" % number for number in range(len(lines))]
        lengths.append(len(lines))
    thread.join()
    assert lengths == sorted(lengths)
    assert len(reader.get(KEY).split()) == 40
