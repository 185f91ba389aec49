"""Files written past the page cache hold the same bytes, however they come and whoever refuses."""

from __future__ import annotations

import errno
import mmap
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.wire.store import vectored_io
from holdfast.wire.store.run_store import FolderStore
from holdfast.wire.store.vectored_io import BLOCK_BYTES, MIN_DIRECT_BYTES, DirectWriter

SIZE = 3 * MIN_DIRECT_BYTES + 5 * BLOCK_BYTES + 77


@pytest.fixture
def memory() -> Iterator[mmap.mmap]:
    """Page-aligned, as an arena's slots are."""
    with mmap.mmap(-1, SIZE) as made:
        made.write(random.Random(4).randbytes(SIZE))
        yield made


def write(path: Path, parts: list[memoryview]) -> DirectWriter:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        writer = DirectWriter(fd)
        for part in parts:
            writer.write(part)
    finally:
        os.close(fd)
    return writer


def supported(folder: Path) -> bool:
    """Whether the file system takes one aligned direct write."""
    try:
        fd = os.open(folder / "probe", os.O_WRONLY | os.O_CREAT | vectored_io._O_DIRECT)
    except OSError:
        return False
    try:
        with mmap.mmap(-1, BLOCK_BYTES) as page:
            return os.write(fd, page) == BLOCK_BYTES
    except OSError:
        return False
    finally:
        os.close(fd)


def test_whole_blocks_pass_the_cache_and_the_tail_does_not(
    tmp_path: Path, memory: mmap.mmap
) -> None:
    with memoryview(memory) as view:
        writer = write(tmp_path / "a", [view])
    assert (tmp_path / "a").read_bytes() == memory[:]
    if supported(tmp_path):
        assert writer.direct_bytes == SIZE // BLOCK_BYTES * BLOCK_BYTES


def test_any_cut_of_the_bytes_gives_the_same_file(tmp_path: Path, memory: mmap.mmap) -> None:
    chooser = random.Random(11)
    for _ in range(40):
        points = sorted(chooser.sample(range(SIZE), chooser.randrange(6)))
        if chooser.random() < 0.5:
            points = [point // BLOCK_BYTES * BLOCK_BYTES for point in points]
        with memoryview(memory) as view:
            cuts = zip([0, *points], [*points, SIZE], strict=True)
            parts = [view[start:stop] for start, stop in cuts]
            write(tmp_path / "a", parts)
            for part in parts:
                part.release()
        assert (tmp_path / "a").read_bytes() == memory[:]


def test_memory_that_is_not_aligned_goes_through_the_cache(tmp_path: Path) -> None:
    data = bytearray(random.Random(2).randbytes(2 * MIN_DIRECT_BYTES + 1))
    with memoryview(data) as view:
        write(tmp_path / "a", [view[1:], view[:1]])
    assert (tmp_path / "a").read_bytes() == data[1:] + data[:1]


@pytest.mark.parametrize("refused", ["flag", "write"])
def test_a_file_system_that_refuses_is_written_as_ever(
    tmp_path: Path, memory: mmap.mmap, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """tmpfs refuses the flag, others the write itself."""
    real = os.write
    tried: list[str] = []

    def flag(fd: int, command: int, value: int = 0) -> int:
        if value & vectored_io._O_DIRECT:
            tried.append("flag")
            raise OSError(errno.EINVAL, "Invalid argument")
        return 0

    def first(fd: int, data: memoryview) -> int:
        tried.append("write")
        if len(tried) == 1:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, data)

    with monkeypatch.context() as patched:
        if refused == "flag":
            patched.setattr("fcntl.fcntl", flag)
        else:
            patched.setattr(os, "write", first)
        with memoryview(memory) as view:
            writer = write(
                tmp_path / "a", [view[: 2 * MIN_DIRECT_BYTES], view[2 * MIN_DIRECT_BYTES :]]
            )
    assert writer.direct_bytes == 0
    assert tried.count("flag") <= 1
    assert tried[0] == refused
    assert (tmp_path / "a").read_bytes() == memory[:]


def test_another_failure_is_told_and_leaves_no_object(
    tmp_path: Path, memory: mmap.mmap, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    store = FolderStore(tmp_path)
    with monkeypatch.context() as patched, memoryview(memory) as view:
        patched.setattr(os, "write", full)
        with pytest.raises(Exception, match="the disk is full"):
            store.create("data/blob", view)
    assert store.list("") == []
    assert list((tmp_path / "data").iterdir()) == []


def test_a_short_write_is_gone_on_with(
    tmp_path: Path, memory: mmap.mmap, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, chooser = os.write, random.Random(8)

    def short(fd: int, data: memoryview) -> int:
        few = chooser.choice([BLOCK_BYTES, 10 * BLOCK_BYTES, len(data)])
        return real(fd, data[:few])

    monkeypatch.setattr(os, "write", short)
    with memoryview(memory) as view:
        write(tmp_path / "a", [view])
    assert (tmp_path / "a").read_bytes() == memory[:]
