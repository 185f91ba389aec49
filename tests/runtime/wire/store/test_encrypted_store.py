"""Sealed checkpoints: what is stored says nothing, and no changed byte comes back as a number."""

from __future__ import annotations

import os
import random
import secrets
from pathlib import Path

import pytest

from holdfast.errors import CorruptError, HoldfastError, StoreError
from holdfast.wire.store.bucket import PART_BYTES, BucketStore
from holdfast.wire.store.encrypted_store import EncryptedStore
from holdfast.wire.store.location import SEAL_KEY_VARIABLE, open_store, probe_store
from holdfast.wire.store.run_store import AlreadyExistsError, FolderStore, MissingKeyError
from tests.support import s3
from tests.support.memory_store import MemoryStore

KEY = bytes(range(32))
NAME = "data/0000000001/blob"


def _store(inner: MemoryStore | None = None, **options: object) -> EncryptedStore:
    given: dict[str, object] = {"extent_bytes": 64}
    return EncryptedStore(inner or MemoryStore(), KEY, **(given | options))  # type: ignore[arg-type]


def _content(size: int) -> bytes:
    """Half of it is easy to compress."""
    return random.Random(size).randbytes(size // 2) + bytes(size - size // 2)


def _replace(inner: MemoryStore, key: str, data: bytes) -> None:
    inner.delete(key)
    inner.create(key, data)


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 128, 1000])
def test_what_was_sealed_comes_back_whole_and_in_every_range(size: int, compress: bool) -> None:
    store = _store(compress=compress)
    content = _content(size)
    store.create(NAME, iter([content[:10], content[10:]]))
    assert store.get(NAME) == content
    assert store.size(NAME) == size
    for start in range(0, size, 37):
        for stop in (start + 1, start + 64, size):
            out = bytearray(max(0, min(stop, size) - start))
            store.read_into(NAME, start, memoryview(out))
            assert out == content[start : start + len(out)]
    with pytest.raises(CorruptError, match=f"ends at byte {size}, {size + 1} were expected"):
        store.read_into(NAME, size, memoryview(bytearray(1)))


def test_a_large_object_is_read_in_several_requests() -> None:
    store = EncryptedStore(MemoryStore(), KEY, extent_bytes=256 * 1024)
    content = os.urandom(20_000_001)
    store.create(NAME, [content])
    out = bytearray(len(content) - 3)
    store.read_into(NAME, 3, memoryview(out))
    assert out == content[3:]


@pytest.mark.parametrize("compress", [False, True])
def test_a_flipped_bit_a_cut_and_a_longer_end_are_never_bytes(compress: bool) -> None:
    """Of every byte of the object, in every part of it."""
    inner = MemoryStore()
    content = _content(300)
    _store(inner, compress=compress).create(NAME, content)
    good = inner.get(NAME)
    broken = [good[:cut] for cut in range(len(good))] + [good + b"x"]
    for place in range(len(good)):
        flipped = bytearray(good)
        flipped[place] ^= 1 << (place % 8)
        broken.append(bytes(flipped))
    for data in broken:
        _replace(inner, NAME, data)
        with pytest.raises(HoldfastError):
            _store(inner).get(NAME)
        out = bytearray(100)
        try:  # a range is right, or it is refused
            _store(inner).read_into(NAME, 100, memoryview(out))
        except HoldfastError:
            continue
        assert out == content[100:200]


def test_extents_cannot_change_places_objects_or_names() -> None:
    inner = MemoryStore()
    store = _store(inner)
    store.create(NAME, _content(300))
    store.create("data/other", _content(300)[::-1])
    first, other = inner.get(NAME), inner.get("data/other")
    assert len(first) == len(other)
    sealed = 64 + 16
    swapped = first[sealed : 2 * sealed] + first[:sealed] + first[2 * sealed :]
    for data in (swapped, other[:sealed] + first[sealed:], first[:sealed] + other[sealed:], other):
        _replace(inner, NAME, data)
        with pytest.raises(CorruptError, match="the seal of"):
            _store(inner).get(NAME)


def test_what_is_stored_shows_nothing_and_differs_each_time() -> None:
    inner = MemoryStore()
    store = _store(inner)
    content = b"the same words again and again " * 20
    seen = []
    for _ in range(3):
        store.create(NAME, content)
        seen.append(inner.get(NAME))
        store.delete(NAME)
    assert len({data[:80] for data in seen}) == 3  # no key and nonce twice
    assert all(b"same words" not in data for data in seen)
    store.create("terms/1.json", b"open")
    store.append("journal/1.jsonl", b"open too\n")
    assert inner.get("terms/1.json") == b"open"
    assert store.get("journal/1.jsonl") == b"open too\n"


def test_another_key_and_what_was_never_sealed() -> None:
    inner = MemoryStore()
    _store(inner).create(NAME, b"x")
    with pytest.raises(StoreError, match="is sealed with another key"):
        EncryptedStore(inner, bytes(32)).get(NAME)
    inner.create("data/plain", b"x" * 100)
    for ask in (_store(inner).get, _store(inner).size):
        with pytest.raises(CorruptError, match="is not sealed"):
            ask("data/plain")
        with pytest.raises(MissingKeyError):
            ask("data/missing")
    with pytest.raises(AlreadyExistsError):
        _store(inner).create(NAME, b"y")


def test_an_object_that_was_made_anew_elsewhere_is_opened_anew() -> None:
    inner = MemoryStore()
    store, other = _store(inner), _store(inner)
    store.create(NAME, _content(300))
    out = bytearray(300)
    store.read_into(NAME, 0, memoryview(out))
    other.delete(NAME)
    other.create(NAME, _content(300)[::-1])
    store.read_into(NAME, 0, memoryview(out))
    assert out == _content(300)[::-1]


def test_compression_makes_it_shorter_where_it_can() -> None:
    inner = MemoryStore()
    store = EncryptedStore(inner, KEY, compress=True)
    store.create(NAME, bytes(10**6))
    assert inner.size(NAME) < 10_000
    store.create("data/random", noise := os.urandom(10**6))
    assert inner.size("data/random") < 10**6 + 1000
    assert store.get("data/random") == noise


def test_in_a_real_bucket_a_sealed_blob_is_not_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(SEAL_KEY_VARIABLE, secrets.token_hex(32))
    with s3.proxied() as proxy:
        where = s3.location(proxy.address, seal="env", compress="zstd")
        content = os.urandom(PART_BYTES + 12345)
        for _ in range(2):
            store = open_store(where)
            assert isinstance(store, EncryptedStore)
            assert isinstance(store.inner, BucketStore)
            store.create(NAME, iter([content]))
        assert PART_BYTES < proxy.sent(NAME) < PART_BYTES + 20_000
        with pytest.raises(AlreadyExistsError):
            store.create(NAME, iter([content[::-1]]))
        assert proxy.sent(NAME) < PART_BYTES + 20_000
        out = bytearray(1000)
        store.read_into(NAME, 8_000_000, memoryview(out))
        assert out == content[8_000_000:8_001_000]
        assert store.get(NAME) == content
        probe_store(store, store.where)


def test_keys_come_from_a_file_of_ones_own_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "seal"
    path.write_text(KEY.hex() + "\n")
    path.chmod(0o600)
    location = f"file://{tmp_path}/run?seal={path}"
    open_store(location).create(NAME, b"x" * 100)
    assert EncryptedStore(FolderStore(tmp_path / "run"), KEY).get(NAME) == b"x" * 100
    monkeypatch.setenv(SEAL_KEY_VARIABLE, KEY.hex())
    assert open_store(f"file://{tmp_path}/run?seal=env&compress=zstd").get(NAME) == b"x" * 100
    path.chmod(0o644)
    with pytest.raises(StoreError, match="other users of this machine can read"):
        open_store(location)
    monkeypatch.setenv(SEAL_KEY_VARIABLE, KEY.hex()[:-2])
    with pytest.raises(StoreError, match=f"^{SEAL_KEY_VARIABLE}: there is no key here") as caught:
        open_store(f"file://{tmp_path}/run?seal=env")
    assert KEY.hex()[:8] not in str(caught.value)
    with pytest.raises(StoreError, match="compress needs seal"):
        open_store(f"file://{tmp_path}/run?compress=zstd")
