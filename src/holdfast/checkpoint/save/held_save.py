"""A save that the run store does not take: old checkpoints make room, and the last step waits.

If the disk is full, the checkpoints that retention would remove a moment later go first, and the
write is repeated. If that is not enough, the save fails, and training continues. Nothing continues
after the run's last step, so its save waits instead. The wait ends once the disk takes the save, a
second place has taken it, or the run is asked to stop. The snapshot keeps its slot meanwhile, and
the workers wait.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from holdfast.checkpoint.save.save_tracker import SaveId, SaveTracker
from holdfast.errors import FencedError, HoldfastError, OutOfSpaceError, RunFolderError
from holdfast.events import SaveWaiting
from holdfast.wire.store.location import SECOND_PLACE_LINK
from holdfast.wire.store.run_store import RunStore, free_bytes

MESSAGE_INTERVAL_S = 60.0
"""Seconds between two lines about a save that waits."""
RETRY_INTERVAL_S = 1.0
QUOTA_RETRY_INTERVAL_S = 60.0
"""Seconds between two attempts while the disk seems too full: a quota does not show in its size."""
SPARE_BYTES = 65536
"""Room for manifests, the commit object and the journal."""

Result = TypeVar("Result")


class HeldSave:
    """Repeats the writes of a save. Safe to use from any thread.

    make_room: removes checkpoints for the sake of a step. removed_count: returns how many were
    removed so far. save_elsewhere: saves the last step's state in the second place, if one is
    named; returns True if the save has ended with that.
    newest_generation: returns the generation that is served now.
    """

    def __init__(
        self,
        store: RunStore,
        last_step: int,
        save_tracker: SaveTracker,
        make_room: Callable[[int], None],
        removed_count: Callable[[], int],
        newest_generation: Callable[[], int],
        save_elsewhere: Callable[[SaveId], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """last_step: of the run; 0 if no save is to wait."""
        self._store, self._last_step, self._save_tracker = store, last_step, save_tracker
        self._make_room, self._removed_count = make_room, removed_count
        self._newest_generation, self._clock = newest_generation, clock
        self._save_elsewhere, self._second_problem = save_elsewhere, ""
        self._is_closed = threading.Event()
        self._lock = threading.Lock()
        self._waiting: dict[object, int] = {}  # attempts that wait, and the bytes of each
        self._said_at = float("-inf")

    def attempt(self, save: SaveId, nbytes: int, write: Callable[[], Result]) -> Result:
        """Call `write`, which stores `nbytes`, until it works or the save is given up.

        Raises what `write` raises, unless the save waits; FencedError once a newer generation is
        served.
        """
        while True:
            before = self._removed_count()
            try:
                return write()
            except (OutOfSpaceError, RunFolderError) as error:
                if isinstance(error, OutOfSpaceError):
                    self._make_room(save[1])
                    if self._removed_count() != before:  # here, or by another thread meanwhile
                        continue
                if save[1] != self._last_step:
                    raise
                self._wait(save, nbytes, error)

    def close(self) -> None:
        """End all waits: their saves fail."""
        self._is_closed.set()

    def _wait(self, save: SaveId, nbytes: int, error: OutOfSpaceError | RunFolderError) -> None:
        """Wait until the next attempt is worth it. Raises `error` once this is closed."""
        is_full, begun, key = isinstance(error, OutOfSpaceError), self._clock(), object()
        with self._lock:
            self._waiting[key] = nbytes
        try:
            while True:
                free = free_bytes(self._store) if is_full else None
                self._report(save, error, free)
                if self._is_closed.wait(RETRY_INTERVAL_S):
                    raise error
                if self._newest_generation() != save[0]:
                    raise FencedError(f"generation {self._newest_generation()} has begun") from None
                try:
                    is_saved = self._save_elsewhere(save)
                except HoldfastError as problem:
                    is_saved, self._second_problem = False, f"; in the second place: {problem}"
                if is_saved:
                    raise HoldfastError("the save is in the second place") from None
                has_room = free is None or free >= nbytes + SPARE_BYTES
                if has_room or self._clock() - begun >= QUOTA_RETRY_INTERVAL_S:
                    return
        finally:
            with self._lock:
                del self._waiting[key]
                is_over = not self._waiting
            if is_over:
                self._save_tracker.set_waiting(save, None)

    def _report(
        self, save: SaveId, error: OutOfSpaceError | RunFolderError, free: int | None
    ) -> None:
        self._save_tracker.set_waiting(save, str(error))
        with self._lock:
            now, wanted = self._clock(), sum(self._waiting.values()) + SPARE_BYTES
            if now - self._said_at < MESSAGE_INTERVAL_S:
                return
            self._said_at = now
        missing = 0 if free is None else max(0, wanted - free)
        reason, where = error.message + self._second_problem, error.where or ""
        remedy = f"{error.remedy}, or name a second one: ln -s FOLDER {where}/{SECOND_PLACE_LINK}"
        self._save_tracker.emit(SaveWaiting(reason, where, remedy, missing, step=save[1]))
