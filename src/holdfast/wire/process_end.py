"""Collections of garbage that a process of our own spares: while it imports, and at its end."""

from __future__ import annotations

import atexit
import gc
import io
from contextlib import suppress

_FILES = (io.TextIOWrapper, io.BufferedWriter)


COLLECTION_THRESHOLDS = (700, 10, 1000)
"""Python's own thresholds, except that a full collection is a hundred times as rare.

Imports alone cause a dozen of them: 0.35 s of processor time with torch, 0.1 s with what an agent
needs. What they look through stays.
"""


def skip_collections() -> None:
    """Spare this process full collections, and those that Python makes at its end.

    The last ones go through all that was imported: 0.35 s of processor time with torch, 0.2 s with
    what an agent needs. Call it first in the `main` of a program. Handlers of `atexit` run as
    before, and open files are flushed. Other finalizers of what a module's variables still hold do
    not run, as in a worker.
    """
    gc.set_threshold(*COLLECTION_THRESHOLDS)
    atexit.register(_end)


def _end() -> None:
    for file in [each for each in gc.get_objects() if type(each) in _FILES]:
        with suppress(OSError, ValueError):  # it is closed, or nothing reads it
            file.flush()
    gc.freeze()
