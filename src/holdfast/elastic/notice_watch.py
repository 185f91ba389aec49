"""Asking a notice source again and again, beside the agent's event loop.

A thread asks, because a metadata service that is out of reach answers after seconds; it is a
daemon, so that leaving does not wait for it. What is new is told once, in the agent's loop: a
service says the same thing until the machine is gone. A source that fails stops nothing: that is
said once, and once more when it answers again.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

from holdfast.elastic.clouds import Source, SourceError, Warned

T = TypeVar("T")


class NoticeWatch:
    """Tells `heard` of every warning that is new, and `say` when the source fails and recovers."""

    def __init__(
        self, source: Source | None, every: float, heard: Callable[[Warned], None],
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        """`source`: None asks nobody. `every`: seconds between two questions. Call in the loop that
        `heard` and `say` want."""
        self._every = every
        self._heard, self._say = heard, say
        self._loop = asyncio.get_running_loop()
        self._over = threading.Event()
        if source is not None:
            threading.Thread(target=self._ask, args=(source,), name="notices", daemon=True).start()

    def close(self) -> None:
        """Nothing is told afterwards."""
        self._over.set()

    def _ask(self, source: Source) -> None:
        told: set[str] = set()
        failing = False
        while not self._over.is_set():
            try:
                warned = source.ask()
            except SourceError as error:
                if not failing:
                    self._tell(self._say, f"notices cannot be had: {error}; asking again")
                failing = True
            else:
                if failing:
                    self._tell(self._say, "notices can be had again")
                failing = False
                if warned is not None and warned.key not in told:
                    told.add(warned.key)
                    self._tell(self._heard, warned)
            self._over.wait(self._every)

    def _tell(self, whom: Callable[[T], None], what: T) -> None:
        def tell() -> None:
            if not self._over.is_set():
                whom(what)

        try:
            self._loop.call_soon_threadsafe(tell)
        except RuntimeError:  # the loop is closed
            self._over.set()
