"""Tier 3: copies what is committed in the run folder to a bucket, in the background.

One thread of the mover copies the newest committed checkpoint, then waits for the next. A slow,
unreachable or full bucket delays nothing else. A newer checkpoint replaces one that still waits,
and a failed copy is retried, later each time. A copy is of the same objects in the same order
(`copy.py`), so a killed copy is no checkpoint there. The next mover continues with the blobs that
have not arrived.

A run whose folder is lost begins from the bucket. `bring_back` copies the newest complete
checkpoint into the folder before anything else is read there. If a blob in the folder is corrupt,
it is read from the bucket (`fallback_store.py`).

Once a newer generation has sent something, a node that was cut off sends and removes nothing there
(`fencing.py`). A step that was left behind, or found corrupt, is neither sent nor waited for, nor
brought back. The remains of a copy that was given up are removed after the next upload
(`Uploader._tidy`). Those of older generations are removed once after each start. An orderly end
waits for the last copy (`Uploader.waiting`, `elastic/agent/final_upload.py`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

from holdfast.checkpoint.bucket import fencing
from holdfast.checkpoint.bucket.copy import copy_checkpoint
from holdfast.checkpoint.bucket.copy_lease import ClaimedError
from holdfast.checkpoint.restore.catalog import listing, step_of
from holdfast.checkpoint.save import retention
from holdfast.core.format.manifest import parse_commit_key
from holdfast.errors import (
    CheckpointError,
    FencedError,
    HoldfastError,
    RunFolderError,
)
from holdfast.events import CheckpointUploaded, Event, UploadFailed
from holdfast.wire.store.run_store import MissingKeyError, RunStore

RETRY_SECONDS = (1.0, 60.0)
"""Pause after the first failure, and the longest one; doubled in between."""
CLOSE_SECONDS = 20.0
"""Seconds that an ending mover waits for its last upload; the rest is sent at the next start. (At a
normal end its agent has waited before, for as long as bytes moved.)"""
REMOVALS = 5
"""Attempts to remove what an abandoned copy left, each after an upload."""


class Moving:
    """The progress of one checkpoint's copy. Bytes that are sent again do not count: a copy that
    fails at the same place again and again makes no progress."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.key: str | None = None
        self.reason = ""
        self._sent = self._total = 0
        self._since = clock()

    def begin(self, key: str | None) -> None:
        if key != self.key:
            self.key, self.reason, self._since = key, "", self._clock()
            self._sent = self._total = 0

    def to(self, sent: int, total: int) -> None:
        self._total = total
        if sent > self._sent:
            self._sent, self._since = sent, self._clock()

    def told(self) -> dict[str, Any]:
        """Return as JSON: bytes, seconds since the last one moved, and the last failure."""
        still = self._clock() - self._since
        return {"sent": self._sent, "total": self._total, "still": still, "reason": self.reason}


class Uploader:
    """Thread-safe. `open_target` is called on the uploading thread, until it has succeeded once."""

    def __init__(
        self,
        source: RunStore,
        open_target: Callable[[], RunStore],
        keep: retention.Keep,
        tell: Callable[[Event], None],
        clock: Callable[[], float] = time.monotonic,
        rejected: Callable[[], Collection[str]] = tuple,
    ) -> None:
        """`rejected`: keys of checkpoints that were found corrupt, or passed over."""
        self._rejected = rejected
        self._source, self._open_target, self._keep = source, open_target, keep
        self._tell, self._clock = tell, clock
        self._change = threading.Condition()
        self._target: RunStore | None = None
        self._wanted: str | None = None
        self._key: str | None = None  # being sent
        self._failed = self._fenced = False
        self._moving = Moving(self._clock)
        self._arrived: str | None = None  # the newest that the bucket has
        self._begun: set[str] = set()  # copies that were begun and have not arrived
        self._left: dict[tuple[int, int], int] = {}  # (step, generation) -> attempts to remove it
        self._sweeps = REMOVALS
        self._busy = True  # until the first look at what lies in the source
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="upload", daemon=True)
        self._thread.start()

    def committed(self, key: str) -> None:
        """The source has a new checkpoint."""
        with self._change:
            self._wanted = key
            self._change.notify_all()

    def underway(self) -> tuple[str, ...]:
        """Return the checkpoint that is being sent. It must not be removed meanwhile: a bucket
        slower than retention would never get a complete one."""
        with self._change:
            return () if self._key is None else (self._key,)

    def waiting(self, wait: float) -> dict[str, Any] | None:
        """Return the pending upload of the newest checkpoint; None once it has arrived. Waits up to
        `wait` seconds for that. "over": it will not get there by waiting on."""
        newest = self._newest()
        with self._change:
            if newest is None or self._change.wait_for(lambda: self._arrived == newest, wait):
                return None
            idle = not self._busy and self._wanted is None
            if idle and self._moving.key != newest:  # one that need not have been sent
                self._wanted = newest
                self._change.notify_all()
                idle = False
            told = self._moving.told() | {"key": newest, "over": idle}
            if self._moving.key != newest:  # an older one is on its way, this one waits
                told |= {"sent": 0, "total": 0}
            return told

    def close(self, wait: float = CLOSE_SECONDS) -> None:
        """Let end what is on its way, for a while; a bucket that fails is not waited for."""
        with self._change:
            self._change.wait_for(
                lambda: not self._busy and (self._wanted is None or self._failed), wait
            )
            self._closing = True
            self._change.notify_all()

    def _work(self) -> None:
        self._look_back()
        pause = RETRY_SECONDS[0]
        while (key := self._next()) is not None:
            if self._upload(key):
                pause = RETRY_SECONDS[0]
                self._done(None)
                continue
            self._done(key)
            with self._change:
                self._change.wait_for(lambda: self._closing, pause)
            pause = min(2 * pause, RETRY_SECONDS[1])

    def _newest(self) -> str | None:
        """The newest in the source that counts: neither rejected nor left behind."""
        return next(iter(self._counting(listing(self._source))), None)

    def _counting(self, keys: list[str]) -> list[str]:
        nothing = {*self._rejected(), *fencing.abandoned(self._source, keys)}
        return [key for key in keys if key not in nothing]

    def _look_back(self) -> None:
        """The newest that an earlier mover committed, and perhaps did not finish sending."""
        try:
            found = self._newest()
        except HoldfastError:
            found = None  # the run store has its own way to say so
        with self._change:
            self._wanted = self._wanted or found
            self._busy = False
            self._change.notify_all()

    def _next(self) -> str | None:
        """The newest checkpoint that waits; None at the end."""
        with self._change:
            self._change.wait_for(lambda: self._closing or self._wanted is not None)
            if self._closing:
                return None
            self._key, self._wanted, self._busy = self._wanted, None, True
            self._moving.begin(self._key)
            return self._key

    def _done(self, again: str | None) -> None:
        with self._change:
            self._wanted = self._wanted or again
            self._key, self._busy = None, False
            self._change.notify_all()

    def _upload(self, key: str) -> bool:
        """Return True if nothing is left to do for this checkpoint."""
        own = 0
        try:
            if not self._counting([key]):
                return True
            if self._target is None:
                self._target = self._open_target()
            own = fencing.enter(self._source, self._target, (parse_commit_key(key) or (0, 0))[1])
            self._send(key, self._target, own)
        except ClaimedError as error:
            self._begun.discard(key)  # what lies there is not ours to remove
            self._say(key, error)
        except (FencedError, MissingKeyError, CheckpointError) as error:
            # Fenced; or removed meanwhile, as a newer one is there; or broken, and to be found out
            # elsewhere. A folder that is not mounted any more looks like each of these.
            if not self._there():
                self._say(key, RunFolderError("the run folder is out of reach"))
                return False
            self._say(key, error)
            if isinstance(error, FencedError):
                return True
        except Exception as error:
            self._say(key, error)
            return False
        if self._target is not None and own:
            with suppress(Exception):  # what is left takes room, and the thread must not end
                self._tidy(self._target, own)
        return True

    def _there(self) -> bool:
        """Return True if the source has any checkpoint: one was committed there before."""
        try:
            return bool(listing(self._source))
        except HoldfastError:
            return False

    def _send(self, key: str, target: RunStore, own: int) -> None:
        begun = self._clock()
        fencing.carry_notes(self._source, target)
        self._begun.add(key)
        copied = copy_checkpoint(
            self._source, key, target, self._moved, read_back=False, passed=self._moved,
            fence=lambda: fencing.check(target, own),
        )  # fmt: skip
        self._begun.discard(key)
        self._failed = self._fenced = False
        seconds = self._clock() - begun
        self._tell(CheckpointUploaded(key, copied.copied, seconds, step=copied.step))
        with self._change:
            self._arrived = key
            self._change.notify_all()

    def _moved(self, done: int, total: int) -> None:
        with self._change:
            self._moving.to(done, total)

    def _tidy(self, target: RunStore, own: int) -> None:
        """Remove from the bucket checkpoints that are too old, and blobs that no commit will name.
        Those come from copies that were given up and, once, from older generations. A removal that
        fails is tried again after the next upload, a few times. Raises FencedError."""
        fencing.check(target, own)
        with self._change:
            wanted = self._wanted
        for key in self._begun - {wanted}:
            self._leave(key)
        self._begun &= {wanted}
        with suppress(HoldfastError):
            # What counts for nothing in the source takes no other checkpoint's place there.
            there = listing(target)
            nothing = {*self._rejected(), *fencing.abandoned(self._source, there)}
            for key in retention.going(target, self._keep, (), nothing):
                self._leave(key)
                target.delete(key)
        for at in list(self._left):
            self._left[at] -= 1
            try:
                retention.discard(target, at[1], at[0])
            except HoldfastError:
                if self._left[at]:
                    continue
            del self._left[at]
        if self._sweeps:
            fencing.check(target, own)
            self._sweeps -= 1
            with suppress(HoldfastError):
                spare = {at for at in [parse_commit_key(wanted or "")] if at}
                retention.sweep(target, own, spare)
                self._sweeps = 0

    def _leave(self, key: str) -> None:
        if at := parse_commit_key(key):
            self._left.setdefault(at, REMOVALS)

    def _say(self, key: str, error: Exception) -> None:
        """Once until an upload has succeeded; and once that we were fenced."""
        known = isinstance(error, HoldfastError)
        text = str(error) if known else f"{type(error).__name__}: {error}"
        with self._change:
            self._moving.reason = text
        fenced = isinstance(error, FencedError)
        if not self._failed or (fenced and not self._fenced):
            self._tell(UploadFailed(key, text, step=step_of(key)))
        self._failed, self._fenced = True, self._fenced or fenced
