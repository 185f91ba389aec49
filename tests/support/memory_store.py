"""A run store in this process's memory, for tests and benchmarks that need no files."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from holdfast.errors import CorruptError
from holdfast.wire.store.run_store import (
    AlreadyExistsError,
    Buffer,
    MissingKeyError,
    byte_views,
    check_key,
)


class MemoryStore:
    """A run store in this process's memory, with the same promises but durability."""

    def __init__(self) -> None:
        self._objects: dict[str, bytearray] = {}
        self._lock = threading.Lock()

    def create(self, key: str, data: Buffer | Iterable[Buffer]) -> None:
        check_key(key)
        whole = bytearray().join(byte_views(data))
        with self._lock:
            if key in self._objects:
                raise AlreadyExistsError(f"{key} exists already")
            self._objects[key] = whole

    def get(self, key: str) -> bytes:
        with self._lock:
            return bytes(self._find(key))

    def read_into(self, key: str, start: int, out: memoryview) -> None:
        view = out.cast("B")
        with self._lock:
            found = memoryview(self._find(key))[start : start + len(view)]
            if len(found) < len(view):
                raise CorruptError(
                    f"{key} ends at byte {start + len(found)}, {start + len(view)} were expected"
                )
            view[:] = found

    def list(self, prefix: str) -> list[str]:
        with self._lock:
            return sorted(key for key in self._objects if key.startswith(prefix))

    def delete(self, key: str) -> None:
        with self._lock:
            self._objects.pop(check_key(key), None)

    def size(self, key: str) -> int:
        with self._lock:
            return len(self._find(key))

    def append(self, key: str, data: Buffer, sync: bool = False) -> None:
        check_key(key)
        with self._lock:
            self._objects[key] = self._objects.get(key, bytearray()) + bytes(data)

    def sweep(self, prefix: str, keep: str = "") -> int:
        return 0  # objects appear in one assignment

    def _find(self, key: str) -> bytearray:
        try:
            return self._objects[check_key(key)]
        except KeyError:
            raise MissingKeyError(f"there is no {key} in memory") from None
