"""Background work: handed over at once, done in order on a thread of its own."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")

FOLLOWER_NICENESS = 10
"""Of a process that follows a run for people. It gives way to workers, and still answers."""
_CLOSE_TIMEOUT_S = 2.0
_BATCH = 100  # items of one call, at most


class BackgroundQueue(Generic[Item]):
    """Calls `work` with what is `put`, in order, some items at a time. A slow terminal or disk
    holds up only this thread. If more than `max_items` items wait, the oldest are `dropped`.

    The thread ends for good when `work` cannot continue: its file is closed, its reader left, the
    disk is full. A failed view is no reason to stop training.
    """

    def __init__(self, name: str, work: Callable[[list[Item]], None], max_items: int) -> None:
        self._work = work
        self._items: deque[Item] = deque(maxlen=max_items)
        self._changed = threading.Condition()
        self._closing = False
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, item: Item) -> None:
        with self._changed:
            self.dropped += len(self._items) == self._items.maxlen
            self._items.append(item)
            self._changed.notify()

    def close(self, timeout_s: float = _CLOSE_TIMEOUT_S, *, while_it_works: bool = False) -> None:
        """Let it do what waits, and give up on it then. while_it_works: the time counts from the
        last item that was taken."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        waiting = -1
        while self._thread.is_alive() and waiting != len(self._items):
            waiting = len(self._items)
            self._thread.join(timeout_s)
            if not while_it_works:
                return

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._items and not self._closing:
                    self._changed.wait()
                if not self._items:
                    return
                items = [self._items.popleft() for _ in range(min(_BATCH, len(self._items)))]
            try:
                self._work(items)
            except (OSError, ValueError, SystemExit):  # rich answers a broken pipe with the last
                return
