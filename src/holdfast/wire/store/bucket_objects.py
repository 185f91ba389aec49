"""The requests of a run store in a bucket, through obstore: one object each, with the run store's
errors. `bucket.py` says which objects a blob or a journal segment consists of.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from math import inf
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import obstore
from obstore.exceptions import AlreadyExistsError as TakenError
from obstore.exceptions import BaseError

from holdfast.errors import CorruptError
from holdfast.wire.store.bucket_errors import is_bucket_missing, translate_error
from holdfast.wire.store.object_version import ObjectVersion
from holdfast.wire.store.run_store import AlreadyExistsError, Buffer, MissingKeyError
from holdfast.wire.store.slow_requests import under_way

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore

MAX_ATTEMPTS = 4
Entries = list[tuple[str, int]]
"""(path, size) of stored objects."""
_WRITER_ATTRIBUTE = "writer"


class ObjectInfo(NamedTuple):
    """Size of an object, and the mark that its writer left."""

    size: int
    writer: str


class BucketObjects:
    """The objects of one bucket, or of one prefix in it. Safe to use from any thread. If a
    request has both, `path` is the object's and `key` is what errors name."""

    def __init__(self, objects: ObjectStore, where: str, patience_s: float = inf) -> None:
        """patience_s: after which a request without an answer is given up, with its repetitions."""
        self._objects, self._where, self._patience_s = objects, where, patience_s

    def create(self, key: str, path: str, data: Buffer, mark: str) -> None:
        """One PUT if absent. Raises AlreadyExistsError when another writer's object is there."""
        for _ in range(MAX_ATTEMPTS):
            try:
                with self._translate_errors(key, writing=True):
                    obstore.put(
                        self._objects,
                        path,
                        data,
                        mode="create",
                        use_multipart=False,
                        attributes={_WRITER_ATTRIBUTE: mark},
                    )
                return
            except AlreadyExistsError:
                found = self.head(path)
                if found is not None and found.writer == mark:
                    return  # the first answer was lost, and the client had asked again
                if found is not None:
                    raise
            # Two creators collided and neither won, or the winner was deleted: once more.
        raise AlreadyExistsError(f"{key} is taken by another writer again and again")

    def upload(
        self, key: str, stream: Iterator[bytearray], mark: str, part_bytes: int, parallel: int
    ) -> None:
        """Send a large object in parts of `part_bytes`, `parallel` at a time; without a
        precondition."""
        with self._translate_errors(key, writing=True):
            obstore.put(
                self._objects,
                key,
                stream,
                use_multipart=True,
                attributes={_WRITER_ATTRIBUTE: mark},
                chunk_size=part_bytes,
                max_concurrency=parallel,
            )

    def put(self, key: str, path: str, content: bytes) -> None:
        with self._translate_errors(key, writing=True):
            obstore.put(self._objects, path, content, use_multipart=False)

    def remove(self, path: str) -> None:
        with suppress(MissingKeyError), self._translate_errors(path):
            obstore.delete(self._objects, path)

    def read(self, path: str) -> bytes:
        with self._translate_errors(path):
            return bytes(obstore.get(self._objects, path).bytes())

    def head(self, path: str) -> ObjectInfo | None:
        """Size and mark of an object, None when there is none."""
        try:
            with self._translate_errors(path):
                found = obstore.get(self._objects, path, options={"head": True})
        except MissingKeyError:
            return None
        return ObjectInfo(found.meta["size"], str(found.attributes.get(_WRITER_ATTRIBUTE, "")))

    def read_range(self, path: str, start: int, outs: Sequence[memoryview]) -> None:
        due = sum(map(len, outs))
        try:
            with self._translate_errors(path):
                data = obstore.get_range(self._objects, path, start=start, length=due)
            count = len(data)
            if count == due:
                _copy_into(memoryview(data), outs)
                return
            end = start + count
        except MissingKeyError:
            raise
        except Exception:
            # A range that begins behind the end is an error of its own kind at every store.
            found = self.head(path)
            if found is None:
                raise self.missing_key_error(path) from None
            if found.size >= start + due:
                raise
            end = found.size
        raise CorruptError(f"{path} ends at byte {end}, {start + due} were expected")

    def list(self, folder: str) -> Entries:
        """(path, size) of everything below the folder, hidden objects too."""
        with self._translate_errors(folder, listing=True):
            found = obstore.list(self._objects, folder or None, chunk_size=1000).collect()
        return [(entry["path"], entry["size"]) for entry in found]

    def versions(self, folder: str) -> Sequence[ObjectVersion]:
        """Return everything below the folder with its version, sorted by path."""
        with self._translate_errors(folder, listing=True):
            found = obstore.list(self._objects, folder or None, chunk_size=1000).collect()
        return sorted(map(_version_of, found))

    def version(self, path: str) -> ObjectVersion:
        """Return the version of an object. Raises MissingKeyError."""
        with self._translate_errors(path):
            return _version_of(obstore.head(self._objects, path))

    def missing_key_error(self, key: str) -> MissingKeyError:
        return MissingKeyError(f"there is no {key} in {self._where}")

    @contextmanager
    def _translate_errors(
        self, key: str, *, writing: bool = False, listing: bool = False
    ) -> Iterator[None]:
        """Turn what obstore says into the run store's own errors, and into one sentence."""
        try:
            with under_way(self._where, self._patience_s):
                yield
        except TakenError:
            raise AlreadyExistsError(f"{key} exists already") from None
        except FileNotFoundError as error:
            # When a key is made, or a folder listed, only the bucket itself can be missing.
            if writing or listing or is_bucket_missing(str(error)):
                raise translate_error(error, self._where, missing=True) from None
            raise self.missing_key_error(key) from None
        except (BaseError, OSError) as error:
            raise translate_error(error, self._where) from None


def _version_of(meta: ObjectMeta) -> ObjectVersion:
    return ObjectVersion(meta["path"], meta["size"], meta["e_tag"] or str(meta["last_modified"]))


def _copy_into(data: memoryview, outs: Iterable[memoryview]) -> None:
    """Copy `data` into buffers that have room for just so much, without the interpreter lock."""
    source, at = np.frombuffer(data, np.uint8), 0
    for out in outs:
        target = np.frombuffer(out, np.uint8)
        np.copyto(target, source[at : at + len(target)])
        at += len(target)
