"""Work on the stretches of a restore: a few threads, which read, check and put in place.

How many, and how much at a time, is the sources' to say (`Source.reads`). Reading, and hashing and
copying more than a few kilobytes, leave the interpreter lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait

from holdfast.checkpoint.restore.read_plan import Stretch
from holdfast.checkpoint.restore.sources import Mixed

ALIVE_SECONDS = 1.0


class Reader:
    """Works stretches off, on `threads` threads with one buffer each."""

    def __init__(self, mixed: Mixed, threads: int) -> None:
        self._mixed = mixed
        self._threads = threads
        self._stop = False

    def read(self, work: Sequence[Stretch], alive: Callable[[], None]) -> None:
        """Returns when every byte is checked and in place; calls `alive` again and again meanwhile.

        Raises as `Mixed.fill` does; the targets are then worthless.
        """
        room = max((stretch.length for stretch in work), default=0)
        threads = min(self._threads, len(work)) or 1
        left = deque(work)
        with ThreadPoolExecutor(threads, "restore") as pool:
            waiting: set[Future[None]] = {
                pool.submit(self._work, left, room) for _ in range(threads)
            }
            try:
                while waiting:
                    done, waiting = wait(waiting, ALIVE_SECONDS, FIRST_EXCEPTION)
                    alive()
                    for future in done:
                        future.result()
            finally:
                self._stop = True
        self._mixed.confirm()

    def _work(self, left: deque[Stretch], room: int) -> None:
        import numpy as np  # here, because movers import this and read by other ways

        # A bytearray would be written over with zeros; these pages come when they are first used,
        # and most reads go past the buffer.
        buffer = np.empty(room, np.uint8).data
        while not self._stop:
            try:
                stretch = left.popleft()
            except IndexError:
                return
            self._mixed.fill(stretch, buffer)
