"""The outcome of every save, and the events that report it.

A long run makes hundreds of thousands of saves, and asks only for the last ones. The newest
SAVES_KEPT, and all that are under way, are kept; older ones are counted and forgotten.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection

from holdfast.core.json_parsing import JsonObject
from holdfast.events import CheckpointCommitted, CheckpointFailed, Event, SnapshotComplete

logger = logging.getLogger(__name__)

MAX_EVENTS_KEPT = 4096
"""The agent reads events within a tick; this many are kept for one that is late."""
EVENT_BATCH_WAIT_S = 0.02
"""Seconds in which later events join a first one. A snapshot is complete here, and a few
milliseconds later on the other node."""
MAX_SAVES_KEPT = 64
"""No rank has more than a few steps on their way: its slots are two or three."""

SaveId = tuple[int, int]
"""(generation, step)."""


class SaveTracker:
    """Thread-safe. A save is under way, committed (its key) or failed (the reason)."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._change = threading.Condition()
        self._events: deque[tuple[int, Event]] = deque(maxlen=MAX_EVENTS_KEPT)
        self._next = 0
        self._wakes = 0
        self._started_at: dict[SaveId, float] = {}
        self._committed_keys: dict[SaveId, str] = {}
        self._failure_reasons: dict[SaveId, str] = {}
        self._restarted: set[SaveId] = set()
        self._waiting_reasons: dict[SaveId, str] = {}  # saves that the store does not take now
        self._forgotten_counts = {"committed": 0, "failed": 0}  # of those that were forgotten
        self._newest_forgotten: SaveId = (0, -1)  # the newest of them
        self._warnings: deque[str] = deque(maxlen=16)
        self.commit_listeners: list[Callable[[str], None]] = []
        """Called with the key of each checkpoint that was committed; at once, so must not wait."""
        self.failure_listeners: list[Callable[[SaveId, str], None]] = []
        """Called with each save that has failed here, and why; at once, so must not wait."""
        self.is_under_way: Callable[[SaveId], bool] = lambda save: False
        """Return the saves that are kept at any age. It is called under the lock, so it must not
        wait."""

    def begin_save(self, save: SaveId) -> None:
        with self._change:
            self._started_at.setdefault(save, self._clock())
            self._forget_old()

    def record_commit(self, save: SaveId, key: str, nbytes: int, place: str = "") -> None:
        """place: as in `CheckpointCommitted`."""
        for listener in (
            self.commit_listeners if not place else ()
        ):  # before a waiter for the end can ask further
            listener(key)
        with self._change:
            seconds = self._clock() - self._started_at.get(save, self._clock())
            self._committed_keys[save] = key
            self._restarted.discard(save)
            self._append_event(CheckpointCommitted(key, nbytes, seconds, place, step=save[1]))

    def record_remote_commit(self, save: SaveId, key: str) -> None:
        """Another mover has committed a save, and has told it."""
        with self._change:
            self._committed_keys.setdefault(save, key)
            self._failure_reasons.pop(save, None)
            self._restarted.discard(save)
            self._forget_old()
            self._change.notify_all()

    def record_failure(self, save: SaveId, reason: str, emit_event: bool = True) -> None:
        """The first reason counts; one event per save. Without `emit_event`, where another mover
        has told it, there is none."""
        with self._change:
            known = {save} & (
                self._failure_reasons.keys() | self._committed_keys.keys() | self._restarted
            )
            if known or self._is_forgotten(save):
                return
            self._failure_reasons[save] = reason
            self._forget_old()
            if emit_event:
                self._append_event(CheckpointFailed(reason, save[0], step=save[1]))
            self._change.notify_all()
        for listener in self.failure_listeners if emit_event else ():
            listener(save, reason)

    def set_waiting(self, save: SaveId, reason: str | None) -> None:
        """Note why a save waits; None: it waits no longer."""
        with self._change:
            if reason is None:
                self._waiting_reasons.pop(save, None)
            else:
                self._waiting_reasons[save] = reason

    def restart(self, save: SaveId) -> None:
        """Note that a save is repeated by other means. Whatever the first attempt's result, its
        waiters now wait for the end of this one (`record_commit` or `abort`)."""
        with self._change:
            self._restarted.add(save)
            self._failure_reasons.pop(save, None)
            self._started_at.setdefault(save, self._clock())

    def is_restarted(self, save: SaveId) -> bool:
        """Return True if `restart` was called and that save has not ended: it uses what the first
        attempt left."""
        with self._change:
            return save in self._restarted

    def abort(self, save: SaveId, reason: str, emit_event: bool = True) -> None:
        """The end of `restart` that is none."""
        with self._change:
            self._restarted.discard(save)
        self.record_failure(save, reason, emit_event)

    def is_committed(self, save: SaveId) -> bool:
        with self._change:
            return save in self._committed_keys

    def failure_reason(self, save: SaveId) -> str | None:
        with self._change:
            return self._failure_reasons.get(save)

    def open_steps(self, generation: int) -> list[int]:
        """Steps that have neither been committed nor failed, oldest first."""
        with self._change:
            ended = set(self._committed_keys) | set(self._failure_reasons)
            return sorted(s for g, s in set(self._started_at) - ended if g == generation)

    def warn(self, text: str) -> None:
        with self._change:
            self._warnings.append(text)

    def emit(self, event: Event) -> None:
        if not isinstance(event, SnapshotComplete):  # of every step, if so configured
            logger.info("%s", event)
        with self._change:
            self._append_event(event)

    def wait_until_ended(self, save: SaveId, wait_s: float) -> tuple[bool, str | None]:
        """(whether the save has ended within `wait_s` seconds, why it is not committed). If it has
        not ended, the reason is the cause of a wait that has no end yet, or None."""
        with self._change:
            done = self._change.wait_for(
                lambda: (
                    save in self._committed_keys
                    or save in self._failure_reasons
                    or self._is_forgotten(save)
                ),
                wait_s,
            )
            if not done:
                return False, self._waiting_reasons.get(save)
            if self._is_forgotten(save):
                return True, "it is too long ago to say what became of it"
            return True, None if save in self._committed_keys else self._failure_reasons[save]

    def wait_for_ends(
        self, saves: Collection[SaveId], wait_s: float
    ) -> dict[SaveId, tuple[str | None, str]]:
        """Those that have ended: the commit object's key, or None and the reason. Waits for the
        first."""

        def found() -> dict[SaveId, tuple[str | None, str]]:
            ended = [
                save
                for save in saves
                if save in self._committed_keys or save in self._failure_reasons
            ]
            return {
                s: (self._committed_keys.get(s), self._failure_reasons.get(s, "")) for s in ended
            }

        with self._change:
            self._change.wait_for(found, wait_s)
            return found()

    def events_since(self, mark: int, wait_s: float) -> tuple[list[tuple[str, JsonObject]], int]:
        """Events after `mark` as (kind, fields), and the next mark; waits for the first."""
        with self._change:
            wakes = self._wakes
            self._change.wait_for(lambda: self._next > mark or self._wakes > wakes, wait_s)
            if wait_s > 0 and self._next > mark:
                self._change.wait_for(lambda: self._wakes > wakes, EVENT_BATCH_WAIT_S)
            found = [(e.kind, e.body) for number, e in self._events if number >= mark]
            return found, self._next

    def wake_event_waiters(self) -> None:
        """Answer all requests that wait for events: a generation has ended, and with it their
        senders."""
        with self._change:
            self._wakes += 1
            self._change.notify_all()

    def counts(self) -> JsonObject:
        with self._change:
            open_steps = (
                set(self._started_at) - set(self._committed_keys) - set(self._failure_reasons)
            )
            return {
                "committed": len(self._committed_keys) + self._forgotten_counts["committed"],
                "failed": len(self._failure_reasons) + self._forgotten_counts["failed"],
                "open": sorted(step for _, step in open_steps),
                "warnings": list(self._warnings),
            }

    def _tracked_saves(self) -> set[SaveId]:
        return {*self._started_at, *self._committed_keys, *self._failure_reasons, *self._restarted}

    def _is_forgotten(self, save: SaveId) -> bool:
        return save <= self._newest_forgotten and save not in self._tracked_saves()

    def _forget_old(self) -> None:
        """Whatever is older than the newest and not under way; twice as many are let grow, so that
        this is rare."""
        known = self._tracked_saves()
        if len(known) <= 2 * MAX_SAVES_KEPT:
            return
        for save in sorted(known)[:-MAX_SAVES_KEPT]:
            if save in self._restarted or self.is_under_way(save):
                continue
            self._started_at.pop(save, None)
            self._forgotten_counts["committed"] += self._committed_keys.pop(save, None) is not None
            self._forgotten_counts["failed"] += self._failure_reasons.pop(save, None) is not None
            self._newest_forgotten = max(self._newest_forgotten, save)

    def _append_event(self, event: Event) -> None:
        self._events.append((self._next, event))
        self._next += 1
        self._change.notify_all()
