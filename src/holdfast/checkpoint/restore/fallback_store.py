"""The bucket as a second place for what the run folder lacks or has rotten.

It is opened and asked only where the folder falls short: a restart that finds all it needs in
memory and in the folder costs no request, and a bucket that is away cannot delay it. A checkpoint
of which the folder has some blobs whole and the bucket the others is whole: readers mix them by
extent (`sources.Mixed`), and `opened` looks at sizes and headers accordingly.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from holdfast.checkpoint.format.box_index import Index
from holdfast.checkpoint.restore import reader, verify
from holdfast.core.format.manifest import Commit, Writer
from holdfast.errors import CorruptError, HoldfastError, RunFolderError, StoreError
from holdfast.wire.store.run_store import RunStore

BUCKET = "bucket"
"""What the second place is called where sources are named."""


class Second:
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


def opened(
    first: RunStore, second: Second | None, key: str, config_hash: str,
    noted: Callable[[str], None] = lambda reason: None,
) -> Commit:  # fmt: skip
    """The commit object of a checkpoint whose blobs are there and begin as they must, each in one
    place or in the other. `noted(reason)`: what the first has not whole, and the second gives.

    Raises as `restore.opened` where there is no second place; StoreError where that would be needed
    and cannot be asked: the checkpoint may be whole there.
    """
    try:
        return verify.opened(first, key)
    except HoldfastError as error:
        if second is None:
            raise
        problem = error
    try:
        commit = _mixed(first, second.store, key)
    except StoreError as error:
        raise StoreError(f"{problem}; and the bucket cannot be asked: {error}") from error
    except HoldfastError as error:
        if isinstance(problem, RunFolderError):
            raise problem from error  # the folder failed rather than its bytes
        raise CorruptError(f"{problem}; in the bucket: {error}") from error
    if commit.config_hash != config_hash:
        raise problem  # of another run: nothing to do with this one
    noted(str(problem))
    return commit


def _mixed(first: RunStore, second: RunStore, key: str) -> Commit:
    """Raises what the second place has to say where both fall short."""
    try:
        commit = reader.Checkpoint.open(first, key).commit
    except HoldfastError:
        commit = reader.Checkpoint.open(second, key).commit
    index = Index(commit)
    for writer in commit.writers:
        if _problem(first, index, writer) is not None:
            reason = verify.head_problem(second, index, writer)
            if reason is not None:
                raise CorruptError(reason)
    return commit


def _problem(store: RunStore, index: Index, writer: Writer) -> str | None:
    try:
        return verify.head_problem(store, index, writer)
    except HoldfastError as error:
        return str(error)
