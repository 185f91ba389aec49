"""A run store in a bucket: S3 and what speaks like it, Google, Azure.

Create-if-absent is one PUT with a precondition, so it is kept for objects that fit into one
request: terms, generations, parts, commit objects. Each carries a random `writer` mark, so that an
answer that was lost on the way, and asked for again, is known as our own.

A large blob is sent in parts, several at a time, without a precondition: some servers ignore one
when an upload in parts is completed. Nothing rests on it. A blob's key belongs to one generation,
step and writer, and only a commit object makes its bytes count. A small `.sum-` object next to the
blob, written before the blob is completed, makes an upload resumable: mark, size and checksum. If a
blob there has that mark, that size and the checksum of the bytes in hand, they need not be sent
again. Anything else there is AlreadyExistsError. (The checksum of a stream is known at its end,
when a blob's own metadata can no longer be set. Parts of an unfinished upload cannot be found again
through obstore: they are sent again.)

Object stores cannot append: `bucket_segments.py` makes a journal segment of numbered objects. Names
that begin with a dot are this driver's own and no keys.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from itertools import chain
from math import inf
from typing import TYPE_CHECKING, TypeVar

from xxhash import xxh3_128

from holdfast.wire.store.bucket_objects import BucketObjects, ObjectInfo
from holdfast.wire.store.bucket_segments import APPEND_INTERVAL_S, BucketSegments, segment_of
from holdfast.wire.store.rechunk import rechunk
from holdfast.wire.store.run_store import JOURNAL_PREFIX as SEGMENTS
from holdfast.wire.store.run_store import (
    AlreadyExistsError,
    Buffer,
    MissingKeyError,
    ReadPreference,
    byte_views,
    check_key,
)
from holdfast.wire.store.vectored_io import group_buffers

if TYPE_CHECKING:
    from obstore.store import ObjectStore

PART_BYTES = 8 * 2**20
"""Objects up to this size are one request; larger ones are sent in parts of it."""
READ_BYTES = 16 * 2**20
"""More is read in several requests at a time, so that one request's time-out holds for each."""
MAX_PARALLEL_REQUESTS = 8
T = TypeVar("T")
R = TypeVar("R")


class BucketStore:
    """Keeps the promises of `RunStore` in `objects` (a store of obstore); `where` is for errors.

    How long a request may take is decided where `objects` is made (`wire/store/location.py`).
    """

    reads = ReadPreference(32, 4 * 2**20)
    append_interval_s = APPEND_INTERVAL_S

    def __init__(
        self,
        objects: ObjectStore,
        where: str,
        *,
        part_bytes: int = PART_BYTES,
        parallel: int = MAX_PARALLEL_REQUESTS,
        patience_s: float = inf,
    ) -> None:
        self.where = where
        self._objects = BucketObjects(objects, where, patience_s)
        self._part_bytes = part_bytes
        self._parallel = parallel
        self._segments = BucketSegments(self._objects, self._run_parallel)

    # --- complete objects -------------------------------------------------------------------
    def create(self, key: str, data: Buffer | Iterable[Buffer]) -> None:
        check_key(key)
        if key.startswith(SEGMENTS):
            self._segments.begin(key, b"".join(byte_views(data)))
            return
        parts = rechunk(byte_views(data), self._part_bytes)
        first = next(parts, bytearray())
        if len(first) < self._part_bytes:
            self._objects.create(key, key, first, secrets.token_hex(16))
        else:
            self._create_large(key, chain([first], parts))

    def replace(self, key: str, data: Buffer) -> None:
        self._objects.put(key, check_key(key), bytes(data))

    def get(self, key: str) -> bytes:
        check_key(key)
        if key.startswith(SEGMENTS):
            return self._segments.read(key)
        return self._objects.read(key)

    def read_into(self, key: str, start: int, out: memoryview) -> None:
        check_key(key)
        view = out.cast("B")
        if key.startswith(SEGMENTS):
            self._segments.read_range(key, start, view)
            return
        if not view:
            self.size(key)
            return
        self.scatter(key, start, [view])

    def scatter(self, key: str, start: int, outs: Sequence[memoryview]) -> None:
        ranges, at = [], start
        for group in group_buffers(outs, READ_BYTES):
            ranges.append((check_key(key), at, group))
            at += sum(map(len, group))
        self._run_parallel(lambda each: self._objects.read_range(*each), ranges)

    def list(self, prefix: str) -> list[str]:
        found = (_key_of(path) for path, _ in self._objects.list(prefix.rpartition("/")[0]))
        return sorted({key for key in found if key is not None and key.startswith(prefix)})

    def delete(self, key: str) -> None:
        check_key(key)
        if key.startswith(SEGMENTS):
            self._segments.delete(key)
            return
        self._objects.remove(_checksum_path(key))  # first: alone it would never be listed again
        self._objects.remove(key)

    def size(self, key: str) -> int:
        check_key(key)
        if key.startswith(SEGMENTS):
            return self._segments.size(key)
        found = self._objects.head(key)
        if found is None:
            raise self._objects.missing_key_error(key)
        return found.size

    def sweep(self, prefix: str, keep: str = "") -> int:
        """Unfinished uploads cannot be listed through obstore (docs/guide/stores.md: a lifecycle
        rule); what goes here are checksums without a blob."""
        paths = {path for path, _ in self._objects.list(prefix.rstrip("/"))}
        orphans = [
            path
            for path in sorted(paths)
            if (blob := _blob_of_checksum(path)) and blob not in paths
            if not (keep and path.startswith(f"{keep.rstrip('/')}/"))
        ]
        for path in orphans:
            self._objects.remove(path)
        return len(orphans)

    def has_same_bytes(self, key: str, data: Iterable[Buffer]) -> bool:
        """Return True if a large blob is there and has these bytes; nothing is sent."""
        found = self._objects.head(check_key(key))
        return found is not None and self._has_same_bytes(
            key, found, rechunk(byte_views(data), self._part_bytes)
        )

    # --- writing ----------------------------------------------------------------------------
    def _create_large(self, key: str, parts: Iterator[bytearray]) -> None:
        found = self._objects.head(key)
        if found is not None:
            if not self._has_same_bytes(key, found, parts):
                raise AlreadyExistsError(f"{key} exists already")
            return
        digest = _UploadDigest()
        mark = secrets.token_hex(16)
        stream = _UploadStream(
            parts, digest, lambda: self._write_checksum(key, digest.to_bytes(mark))
        )
        try:
            self._objects.upload(key, stream, mark, self._part_bytes, self._parallel)
        except Exception:
            if stream.error is not None:
                raise stream.error from None  # the source failed, the bucket only had to give up
            if not (stream.ended and self._has_arrived(key, mark, digest.size)):
                raise

    def _has_same_bytes(self, key: str, found: ObjectInfo, parts: Iterable[bytearray]) -> bool:
        """Return True if a blob has these bytes, by the checksum that its writer left."""
        digest = _UploadDigest()
        for part in parts:
            digest.add(part)
        return self._read_checksum(key) == digest.to_bytes(found.writer)

    def _has_arrived(self, key: str, mark: str, size: int) -> bool:
        """Return True if an upload was completed although its answer was lost."""
        with suppress(Exception):
            return self._objects.head(key) == ObjectInfo(size, mark)
        return False

    def _write_checksum(self, key: str, content: bytes) -> None:
        # On another thread: this one is inside the upload, where obstore cannot be called.
        self._threads.submit(self._objects.put, key, _checksum_path(key), content).result()

    def _read_checksum(self, key: str) -> bytes:
        try:
            return self._objects.read(_checksum_path(key))
        except MissingKeyError:
            return b""

    # --- journal segments -------------------------------------------------------------------
    def append(self, key: str, data: Buffer, sync: bool = False) -> None:
        check_key(key)
        if not key.startswith(SEGMENTS):
            raise ValueError(f"{key!r} is not a journal segment: nothing else can be appended to")
        self._segments.append(key, bytes(data))

    def segment_sizes(self, prefix: str) -> dict[str, int]:
        return self._segments.sizes(prefix)

    # --- helpers ----------------------------------------------------------------------------
    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._parallel, "bucket")

    def _run_parallel(self, work: Callable[[T], R], items: Iterable[T]) -> Sequence[R]:
        """All of it, several at a time; the first error once all have ended."""
        wanted = list(items)
        if len(wanted) < 2:
            return [work(item) for item in wanted]
        running = [self._threads.submit(work, item) for item in wanted]
        errors = [error for task in running if (error := task.exception()) is not None]
        if errors:
            raise errors[0]
        return [task.result() for task in running]


class _UploadDigest:
    """Size and checksum of what an upload sent."""

    def __init__(self) -> None:
        self.size = 0
        self._state = xxh3_128()

    def add(self, data: bytearray) -> None:
        self._state.update(data)
        self.size += len(data)

    def to_bytes(self, mark: str) -> bytes:
        value = {"size": self.size, "writer": mark, "xxh3": self._state.hexdigest()}
        return json.dumps(value, sort_keys=True).encode() + b"\n"


class _UploadStream:
    """The parts of an upload as obstore asks for them; before the last answer, the checksum is
    stored. What the source raises is kept: obstore may put an error of its own in its place."""

    def __init__(
        self, parts: Iterator[bytearray], digest: _UploadDigest, at_end: Callable[[], None]
    ) -> None:
        self.error: BaseException | None = None
        self.ended = False
        self._parts, self._digest, self._at_end = parts, digest, at_end

    def __iter__(self) -> _UploadStream:
        return self

    def __next__(self) -> bytearray:
        try:
            part = next(self._parts, None)
            if part is None:
                if not self.ended:
                    self._at_end()
                    self.ended = True
                raise StopIteration
            self._digest.add(part)
            return part
        except StopIteration:
            raise
        except BaseException as error:
            self.error = error
            raise


def _key_of(path: str) -> str | None:
    """Return the key that an object belongs to; None if it belongs to none."""
    try:
        return check_key(segment_of(path) or path)
    except ValueError:
        return None


def _checksum_path(key: str) -> str:
    folder, slash, name = key.rpartition("/")
    return f"{folder}{slash}.sum-{name}"


def _blob_of_checksum(path: str) -> str | None:
    folder, slash, name = path.rpartition("/")
    return f"{folder}{slash}{name.removeprefix('.sum-')}" if name.startswith(".sum-") else None
