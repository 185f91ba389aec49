"""The bucket as a second source for what is missing or corrupt in the run folder.

It is opened and read only if the folder falls short. A restart that finds all it needs in memory
and in the folder costs no request, and a bucket that is away cannot delay it. A checkpoint is
intact if the folder has some blobs intact and the bucket has the rest. Readers mix them by extent
(`sources.FallbackReader`), and `opened` checks sizes and headers accordingly.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from holdfast.checkpoint.format.box_index import BoxIndex
from holdfast.checkpoint.restore import reader, verify
from holdfast.core.format.manifest import Commit, WriterShare
from holdfast.errors import CorruptError, HoldfastError, RunFolderError, StoreError
from holdfast.wire.store.run_store import RunStore

BUCKET_SOURCE = "bucket"
"""Name of the second place among the sources."""


class LazyStore:
    """A run store that is opened when it is first asked. Safe to use from any thread."""

    def __init__(self, open_store: Callable[[], RunStore]) -> None:
        self._open = open_store
        self._lock = threading.Lock()
        self._store: RunStore | None = None

    @property
    def store(self) -> RunStore:
        """Raises StoreError."""
        with self._lock:
            if self._store is None:
                self._store = self._open()
            return self._store

    def read_into(self, key: str, start: int, out: memoryview) -> None:
        self.store.read_into(key, start, out)


def open_commit_with_fallback(
    first: RunStore,
    fallback: LazyStore | None,
    key: str,
    config_hash: str,
    on_fallback_used: Callable[[str], None] = lambda reason: None,
) -> Commit:
    """Return the commit object of a checkpoint whose blobs exist and begin as they must, each in
    one of the two places. `noted(reason)` is called for what the first has damaged and the second
    gives.

    Raises as `restore.opened` if there is no second place. Raises StoreError if that is needed and
    cannot be reached: the checkpoint may be intact there.
    """
    try:
        return verify.open_commit(first, key)
    except HoldfastError as error:
        if fallback is None:
            raise
        problem = error
    try:
        # Raises what the second place has to say where both fall short.
        try:
            commit = reader.Checkpoint.open(first, key).commit
        except HoldfastError:
            commit = reader.Checkpoint.open(fallback.store, key).commit
        index = BoxIndex(commit)
        for writer in commit.writers:
            if _find_head_problem(first, index, writer) is not None:
                reason = verify.find_head_problem(fallback.store, index, writer)
                if reason is not None:
                    raise CorruptError(reason)
    except StoreError as error:
        raise StoreError(f"{problem}; and the bucket cannot be asked: {error}") from error
    except HoldfastError as error:
        if isinstance(problem, RunFolderError):
            raise problem from error  # the folder failed rather than its bytes
        raise CorruptError(f"{problem}; in the bucket: {error}") from error
    if commit.config_hash != config_hash:
        raise problem  # of another run: nothing to do with this one
    on_fallback_used(str(problem))
    return commit


def _find_head_problem(store: RunStore, index: BoxIndex, writer: WriterShare) -> str | None:
    try:
        return verify.find_head_problem(store, index, writer)
    except HoldfastError as error:
        return str(error)
