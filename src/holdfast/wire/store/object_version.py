"""Objects that other programs have written: their names, sizes and versions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class ObjectVersion(NamedTuple):
    """An object as a bucket lists it. version: another one after a write."""

    path: str
    size: int
    version: str


class Objects(Protocol):
    """A bucket that is only read; `bucket_objects.BucketObjects` is one."""

    def versions(self, folder: str) -> Sequence[ObjectVersion]:
        """Return everything below a folder, sorted."""

    def version(self, path: str) -> ObjectVersion:
        """Raises MissingKeyError."""

    def read_range(self, path: str, start: int, outs: Sequence[memoryview]) -> None:
        """Fill `outs`. Raises MissingKeyError, and CorruptError if the object ends before."""
