"""Background work: handed over at once, done in order on a thread of its own."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")

_CLOSE_TIMEOUT_S = 2.0


class BackgroundQueue(Generic[Item]):
    """Calls `work` with what is `put`, in order. A slow terminal or disk holds up only this
    thread. If more than `max_items` items wait, the oldest are dropped.

    The thread ends for good when `work` cannot continue: its file is closed, its reader left, the
    disk is full. A failed view is no reason to stop training.
    """

    def __init__(self, name: str, work: Callable[[Item], None], max_items: int) -> None:
        self._work = work
        self._items: deque[Item] = deque(maxlen=max_items)
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, item: Item) -> None:
        with self._changed:
            self._items.append(item)
            self._changed.notify()

    def close(self) -> None:
        """Let it do what waits; give up on it after two seconds."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._items and not self._closing:
                    self._changed.wait()
                if not self._items:
                    return
                item = self._items.popleft()
            try:
                self._work(item)
            except (OSError, ValueError, SystemExit):  # rich answers a broken pipe with the last
                return
