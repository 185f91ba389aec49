"""Holders of a run folder's term that need no process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.wire.store.run_store import FolderStore

QUIET = 0.3
"""Seconds without growth after which these tests take a holder for dead."""


@contextmanager
def growing(store: FolderStore, key: str = "terms/0000000001-alive") -> Iterator[None]:
    """Within, an object of the run folder grows, as that of a trainer at work."""
    ended = threading.Event()

    def grow() -> None:
        while not ended.wait(QUIET / 10):
            store.append(key, b".")

    thread = threading.Thread(target=grow)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
