"""The outcome of every save, and the events that report it.

A long run makes hundreds of thousands of saves, and asks only for the last ones. The newest
SAVES_KEPT, and all that are under way, are kept; older ones are counted and forgotten.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

from holdfast.events import CheckpointCommitted, CheckpointFailed, Event

logger = logging.getLogger(__name__)

EVENTS_KEPT = 4096
"""The agent reads events within a tick; this many are kept for one that is late."""
TOGETHER_SECONDS = 0.02
"""Seconds in which later events join a first one. A snapshot is complete here, and a few
milliseconds later on the other node."""
SAVES_KEPT = 64
"""No rank has more than a few steps on their way: its slots are two or three."""


Save = tuple[int, int]
"""(generation, step)."""


class Outcomes:
    """Thread-safe. A save is under way, committed (its key) or failed (the reason)."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._change = threading.Condition()
        self._events: deque[tuple[int, Event]] = deque(maxlen=EVENTS_KEPT)
        self._next = 0
        self._wakes = 0
        self._started: dict[Save, float] = {}
        self._keys: dict[Save, str] = {}
        self._reasons: dict[Save, str] = {}
        self._again: set[Save] = set()
        self._ended = {"committed": 0, "failed": 0}  # of those that were forgotten
        self._forgotten: Save = (0, -1)  # the newest of them
        self._warnings: deque[str] = deque(maxlen=16)
        self.durable: list[Callable[[str], None]] = []
        """Called with the key of each checkpoint that was committed; at once, so must not wait."""
        self.failing: list[Callable[[Save, str], None]] = []
        """Called with each save that has failed here, and why; at once, so must not wait."""
        self.underway: Callable[[Save], bool] = lambda save: False
        """Return the saves that are kept at any age. It is called under the lock, so it must not
        wait."""

    def captured(self, save: Save) -> None:
        with self._change:
            self._started.setdefault(save, self._clock())
            self._forget()

    def succeed(self, save: Save, key: str, nbytes: int) -> None:
        for listener in self.durable:  # before a waiter for the end can ask further
            listener(key)
        with self._change:
            seconds = self._clock() - self._started.get(save, self._clock())
            self._keys[save] = key
            self._again.discard(save)
            self._put(CheckpointCommitted(key, nbytes, seconds, step=save[1]))

    def learn(self, save: Save, key: str) -> None:
        """Another mover has committed a save, and has told it."""
        with self._change:
            self._keys.setdefault(save, key)
            self._reasons.pop(save, None)
            self._again.discard(save)
            self._forget()
            self._change.notify_all()

    def fail(self, save: Save, reason: str, tell: bool = True) -> None:
        """The first reason counts; one event per save. Without `tell`, where another mover has
        told it, there is none."""
        with self._change:
            known = {save} & (self._reasons.keys() | self._keys.keys() | self._again)
            if known or self._is_forgotten(save):
                return
            self._reasons[save] = reason
            self._forget()
            if tell:
                self._put(CheckpointFailed(reason, save[0], step=save[1]))
            self._change.notify_all()
        for listener in self.failing if tell else ():
            listener(save, reason)

    def again(self, save: Save) -> None:
        """Note that a save is repeated by other means. Whatever the first attempt's result, its
        waiters now wait for the end of this one (`succeed` or `gave_up`)."""
        with self._change:
            self._again.add(save)
            self._reasons.pop(save, None)
            self._started.setdefault(save, self._clock())

    def made_anew(self, save: Save) -> bool:
        """Return True if `again` was called and that save has not ended: it uses what the first
        attempt left."""
        with self._change:
            return save in self._again

    def gave_up(self, save: Save, reason: str, tell: bool = True) -> None:
        """The end of `again` that is none."""
        with self._change:
            self._again.discard(save)
        self.fail(save, reason, tell)

    def committed(self, save: Save) -> bool:
        with self._change:
            return save in self._keys

    def failure(self, save: Save) -> str | None:
        with self._change:
            return self._reasons.get(save)

    def open_steps(self, generation: int) -> list[int]:
        """Steps that have neither been committed nor failed, oldest first."""
        with self._change:
            ended = set(self._keys) | set(self._reasons)
            return sorted(s for g, s in set(self._started) - ended if g == generation)

    def warn(self, text: str) -> None:
        with self._change:
            self._warnings.append(text)

    def add(self, event: Event) -> None:
        logger.info("%s", event)
        with self._change:
            self._put(event)

    def settle(self, save: Save, wait: float) -> tuple[bool, str | None]:
        """(whether the save has ended within `wait` seconds, why it is not committed)."""
        with self._change:
            done = self._change.wait_for(
                lambda: save in self._keys or save in self._reasons or self._is_forgotten(save),
                wait,
            )
            if not done:
                return False, None
            if self._is_forgotten(save):
                return True, "it is too long ago to say what became of it"
            return True, None if save in self._keys else self._reasons[save]

    def ends(self, saves: Collection[Save], wait: float) -> dict[Save, tuple[str | None, str]]:
        """Those that have ended: the commit object's key, or None and the reason. Waits for the
        first."""

        def found() -> dict[Save, tuple[str | None, str]]:
            ended = [save for save in saves if save in self._keys or save in self._reasons]
            return {s: (self._keys.get(s), self._reasons.get(s, "")) for s in ended}

        with self._change:
            self._change.wait_for(found, wait)
            return found()

    def since(self, mark: int, wait: float) -> tuple[list[list[Any]], int]:
        """Events after `mark` as [kind, fields], and the next mark; waits for the first."""
        with self._change:
            wakes = self._wakes
            self._change.wait_for(lambda: self._next > mark or self._wakes > wakes, wait)
            if wait > 0 and self._next > mark:
                self._change.wait_for(lambda: self._wakes > wakes, TOGETHER_SECONDS)
            found = [[e.kind, e.body] for number, e in self._events if number >= mark]
            return found, self._next

    def wake(self) -> None:
        """Answer all requests that wait for events: a generation has ended, and with it their
        senders."""
        with self._change:
            self._wakes += 1
            self._change.notify_all()

    def counts(self) -> dict[str, Any]:
        with self._change:
            open_steps = set(self._started) - set(self._keys) - set(self._reasons)
            return {
                "committed": len(self._keys) + self._ended["committed"],
                "failed": len(self._reasons) + self._ended["failed"],
                "open": sorted(step for _, step in open_steps),
                "warnings": list(self._warnings),
            }

    def _known(self) -> set[Save]:
        return {*self._started, *self._keys, *self._reasons, *self._again}

    def _is_forgotten(self, save: Save) -> bool:
        return save <= self._forgotten and save not in self._known()

    def _forget(self) -> None:
        """Whatever is older than the newest and not under way; twice as many are let grow, so that
        this is rare."""
        known = self._known()
        if len(known) <= 2 * SAVES_KEPT:
            return
        for save in sorted(known)[:-SAVES_KEPT]:
            if save in self._again or self.underway(save):
                continue
            self._started.pop(save, None)
            self._ended["committed"] += self._keys.pop(save, None) is not None
            self._ended["failed"] += self._reasons.pop(save, None) is not None
            self._forgotten = max(self._forgotten, save)

    def _put(self, event: Event) -> None:
        self._events.append((self._next, event))
        self._next += 1
        self._change.notify_all()
