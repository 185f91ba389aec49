"""Work on the stretches of a restore: a few threads, which read, check and put in place.

How many, and how much at a time, is the sources' to say (`Source.reads`). Reading, and hashing and
copying more than a few kilobytes, leave the interpreter lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait

from holdfast.checkpoint.restore.read_plan import ReadRange
from holdfast.checkpoint.restore.sources import FallbackReader

KEEP_ALIVE_INTERVAL_S = 1.0


class ReadPool:
    """Works stretches off, on `thread_count` threads with one buffer each."""

    def __init__(self, reader: FallbackReader, thread_count: int) -> None:
        self._reader = reader
        self._thread_count = thread_count
        self._is_stopped = False

    def read(self, ranges: Sequence[ReadRange], keep_alive: Callable[[], None]) -> None:
        """Returns when every byte is checked and in place; calls `keep_alive` again and again
        meanwhile.

        Raises as `FallbackReader.fill_range` does; the targets are then worthless.
        """
        room = max((stretch.length for stretch in ranges), default=0)
        threads = min(self._thread_count, len(ranges)) or 1
        left = deque(ranges)
        with ThreadPoolExecutor(threads, "restore") as pool:
            waiting: set[Future[None]] = {
                pool.submit(self._read_until_empty, left, room) for _ in range(threads)
            }
            try:
                while waiting:
                    done, waiting = wait(waiting, KEEP_ALIVE_INTERVAL_S, FIRST_EXCEPTION)
                    keep_alive()
                    for future in done:
                        future.result()
            finally:
                self._is_stopped = True
        self._reader.confirm_unchanged()

    def _read_until_empty(self, remaining: deque[ReadRange], buffer_bytes: int) -> None:
        import numpy as np  # here, because movers import this and read by other ways

        # A bytearray would be written over with zeros; these pages come when they are first used,
        # and most reads go past the buffer.
        buffer = np.empty(buffer_bytes, np.uint8).data
        while not self._is_stopped:
            try:
                stretch = remaining.popleft()
            except IndexError:
                return
            self._reader.fill_range(stretch, buffer)
