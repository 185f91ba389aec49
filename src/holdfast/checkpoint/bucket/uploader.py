"""Tier 3: copies what is committed in the run folder to a bucket, in the background.

One thread of the mover copies the newest committed checkpoint, then waits for the next. A slow,
unreachable or full bucket delays nothing else. A newer checkpoint replaces one that still waits,
and a failed copy is retried, later each time. A copy is of the same objects in the same order
(`copy.py`), so a killed copy is no checkpoint there. The next mover continues with the blobs that
have not arrived.

A run whose folder is lost begins from the bucket. `recover_folder` copies the newest complete
checkpoint into the folder before anything else is read there. If a blob in the folder is corrupt,
it is read from the bucket (`fallback_store.py`).

Once a newer generation has sent something, a node that was cut off sends and removes nothing there
(`fencing.py`). A step that was left behind, or found corrupt, is neither sent nor waited for, nor
brought back. The remains of a copy that was given up are removed after the next upload
(`Uploader._clean_bucket`). Those of older generations are removed once after each start. An orderly
end waits for the last copy (`Uploader.wait_for_newest`, `elastic/agent/final_upload.py`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress

from holdfast.checkpoint.bucket import fencing
from holdfast.checkpoint.bucket.copy import copy_checkpoint
from holdfast.checkpoint.bucket.copy_lease import LeaseHeldError
from holdfast.checkpoint.bucket.pending_upload import PendingUpload
from holdfast.checkpoint.restore.catalog import list_commits, step_of
from holdfast.checkpoint.save import retention
from holdfast.core.format.manifest import parse_commit_key
from holdfast.errors import CheckpointError, FencedError, HoldfastError, RunFolderError
from holdfast.events import CheckpointUploaded, Event, UploadFailed
from holdfast.wire.store.run_store import MissingKeyError, RunStore

RETRY_DELAY_RANGE_S = (1.0, 60.0)
"""Pause after the first failure, and the longest one; doubled in between."""
CLOSE_UPLOAD_TIMEOUT_S = 20.0
"""Seconds that an ending mover waits for its last upload; the rest is sent at the next start. (At a
normal end its agent has waited before, for as long as bytes moved.)"""
REMOVAL_ATTEMPTS = 5
"""Attempts to remove what an abandoned copy left, each after an upload."""


class UploadProgress:
    """The progress of one checkpoint's copy. Bytes that are sent again do not count: a copy that
    fails at the same place again and again makes no progress."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.key: str | None = None
        self.reason = ""
        self._sent = self._total = 0
        self._moved_at = clock()

    def begin(self, key: str | None) -> None:
        if key != self.key:
            self.key, self.reason, self._moved_at = key, "", self._clock()
            self._sent = self._total = 0

    def advance(self, sent: int, total: int) -> None:
        self._total = total
        if sent > self._sent:
            self._sent, self._moved_at = sent, self._clock()

    def pending(self, key: str, is_over: bool) -> PendingUpload:
        """Return how far the upload of a key is; nothing of it has moved while another one is on
        its way."""
        sent, total = (self._sent, self._total) if key == self.key else (0, 0)
        still = self._clock() - self._moved_at
        return PendingUpload(key, sent, total, still, self.reason, is_over)


class Uploader:
    """Thread-safe. `open_target` is called on the uploading thread, until it has succeeded once."""

    def __init__(
        self,
        source: RunStore,
        open_target: Callable[[], RunStore],
        retention: retention.RetentionRules,
        emit: Callable[[Event], None],
        clock: Callable[[], float] = time.monotonic,
        rejected_keys: Callable[[], Collection[str]] = tuple,
    ) -> None:
        """`rejected_keys`: keys of checkpoints that were found corrupt, or passed over."""
        self._rejected_keys = rejected_keys
        self._source, self._open_target, self._retention = source, open_target, retention
        self._emit, self._clock = emit, clock
        self._change = threading.Condition()
        self._target: RunStore | None = None
        self._waiting_key: str | None = None
        self._current_key: str | None = None  # being sent
        self._has_failed = self._is_fenced = False
        self._progress = UploadProgress(self._clock)
        self._newest_uploaded: str | None = None  # the newest that the bucket has
        self._unfinished_copies: set[str] = set()  # copies that were begun and have not arrived
        # (step, generation) -> attempts to remove it
        self._removal_attempts_left: dict[tuple[int, int], int] = {}
        self._sweep_attempts_left = REMOVAL_ATTEMPTS
        self._is_busy = True  # until the first look at what lies in the source
        self._is_closing = False
        self._thread = threading.Thread(
            target=self._upload_until_closed, name="upload", daemon=True
        )
        self._thread.start()

    def request_upload(self, key: str) -> None:
        """The source has a new checkpoint."""
        with self._change:
            self._waiting_key = key
            self._change.notify_all()

    def keys_in_use(self) -> tuple[str, ...]:
        """Return the checkpoint that is being sent. It must not be removed meanwhile: a bucket
        slower than retention would never get a complete one."""
        with self._change:
            return () if self._current_key is None else (self._current_key,)

    def wait_for_newest(self, wait_s: float) -> PendingUpload | None:
        """Return the pending upload of the newest checkpoint; None once it has arrived. Waits up to
        `wait_s` seconds for that."""
        newest = self._newest_valid()
        with self._change:
            if newest is None or self._change.wait_for(
                lambda: self._newest_uploaded == newest, wait_s
            ):
                return None
            idle = not self._is_busy and self._waiting_key is None
            if idle and self._progress.key != newest:  # one that need not have been sent
                self._waiting_key = newest
                self._change.notify_all()
                idle = False
            return self._progress.pending(newest, idle)

    def close(self, wait_s: float = CLOSE_UPLOAD_TIMEOUT_S) -> None:
        """Let end what is on its way, for a while; a bucket that fails is not waited for."""
        with self._change:
            self._change.wait_for(
                lambda: not self._is_busy and (self._waiting_key is None or self._has_failed),
                wait_s,
            )
            self._is_closing = True
            self._change.notify_all()

    def _upload_until_closed(self) -> None:
        # The newest that an earlier mover committed, and perhaps did not finish sending.
        try:
            found = self._newest_valid()
        except HoldfastError:
            found = None  # the run store has its own way to say so
        with self._change:
            self._waiting_key = self._waiting_key or found
            self._is_busy = False
            self._change.notify_all()
        pause = RETRY_DELAY_RANGE_S[0]
        while (key := self._take_next()) is not None:
            if self._upload(key):
                pause = RETRY_DELAY_RANGE_S[0]
                self._finish_attempt(None)
                continue
            self._finish_attempt(key)
            with self._change:
                self._change.wait_for(lambda: self._is_closing, pause)
            pause = min(2 * pause, RETRY_DELAY_RANGE_S[1])

    def _newest_valid(self) -> str | None:
        """The newest in the source that counts: neither rejected nor left behind."""
        return next(iter(self._valid_keys(list_commits(self._source))), None)

    def _valid_keys(self, keys: list[str]) -> list[str]:
        nothing = {*self._rejected_keys(), *fencing.superseded_keys(self._source, keys)}
        return [key for key in keys if key not in nothing]

    def _take_next(self) -> str | None:
        """The newest checkpoint that waits; None at the end."""
        with self._change:
            self._change.wait_for(lambda: self._is_closing or self._waiting_key is not None)
            if self._is_closing:
                return None
            self._current_key, self._waiting_key, self._is_busy = self._waiting_key, None, True
            self._progress.begin(self._current_key)
            return self._current_key

    def _finish_attempt(self, retry_key: str | None) -> None:
        with self._change:
            self._waiting_key = self._waiting_key or retry_key
            self._current_key, self._is_busy = None, False
            self._change.notify_all()

    def _upload(self, key: str) -> bool:
        """Return True if nothing is left to do for this checkpoint."""
        own = 0
        try:
            if not self._valid_keys([key]):
                return True
            if self._target is None:
                self._target = self._open_target()
            own = fencing.enter_target(
                self._source, self._target, (parse_commit_key(key) or (0, 0))[1]
            )
            self._send(key, self._target, own)
        except LeaseHeldError as error:
            self._unfinished_copies.discard(key)  # what lies there is not ours to remove
            self._report_failure(key, error)
        except (FencedError, MissingKeyError, CheckpointError) as error:
            # Fenced; or removed meanwhile, as a newer one is there; or broken, and to be found out
            # elsewhere. A folder that is not mounted any more looks like each of these.
            if not self._has_source():
                self._report_failure(key, RunFolderError("the run folder is out of reach"))
                return False
            self._report_failure(key, error)
            if isinstance(error, FencedError):
                return True
        except Exception as error:
            self._report_failure(key, error)
            return False
        if self._target is not None and own:
            with suppress(Exception):  # what is left takes room, and the thread must not end
                self._clean_bucket(self._target, own)
        return True

    def _has_source(self) -> bool:
        """Return True if the source has any checkpoint: one was committed there before."""
        try:
            return bool(list_commits(self._source))
        except HoldfastError:
            return False

    def _send(self, key: str, target: RunStore, own_generation: int) -> None:
        begun = self._clock()
        fencing.copy_start_records(self._source, target)
        self._unfinished_copies.add(key)
        copied = copy_checkpoint(
            self._source,
            key,
            target,
            self._on_progress,
            read_back=False,
            on_extent=self._on_progress,
            check_fence=lambda: fencing.check_target(target, own_generation),
        )
        self._unfinished_copies.discard(key)
        self._has_failed = self._is_fenced = False
        seconds = self._clock() - begun
        self._emit(CheckpointUploaded(key, copied.copied_bytes, seconds, step=copied.step))
        with self._change:
            self._newest_uploaded = key
            self._change.notify_all()

    def _on_progress(self, done: int, total: int) -> None:
        with self._change:
            self._progress.advance(done, total)

    def _clean_bucket(self, target: RunStore, own_generation: int) -> None:
        """Remove from the bucket checkpoints that are too old, and blobs that no commit will name.
        Those come from copies that were given up and, once, from older generations. A removal that
        fails is tried again after the next upload, a few times. Raises FencedError."""
        fencing.check_target(target, own_generation)
        with self._change:
            wanted = self._waiting_key
        for key in self._unfinished_copies - {wanted}:
            self._schedule_removal(key)
        self._unfinished_copies &= {wanted}
        with suppress(HoldfastError):
            # What counts for nothing in the source takes no other checkpoint's place there.
            there = list_commits(target)
            nothing = {*self._rejected_keys(), *fencing.superseded_keys(self._source, there)}
            kept = retention.kept_steps(self._source)
            retention.mark_kept_in_source(target, kept)
            for key in retention.removable_commits(target, self._retention, (), nothing, kept=kept):
                self._schedule_removal(key)
                target.delete(key)
        for at in list(self._removal_attempts_left):
            self._removal_attempts_left[at] -= 1
            try:
                retention.discard_uncommitted(target, at[1], at[0])
            except HoldfastError:
                if self._removal_attempts_left[at]:
                    continue
            del self._removal_attempts_left[at]
        if self._sweep_attempts_left:
            fencing.check_target(target, own_generation)
            self._sweep_attempts_left -= 1
            with suppress(HoldfastError):
                spare = {at for at in [parse_commit_key(wanted or "")] if at}
                retention.sweep_older_generations(target, own_generation, spare)
                self._sweep_attempts_left = 0

    def _schedule_removal(self, key: str) -> None:
        if at := parse_commit_key(key):
            self._removal_attempts_left.setdefault(at, REMOVAL_ATTEMPTS)

    def _report_failure(self, key: str, error: Exception) -> None:
        """Once until an upload has succeeded; and once that we were fenced."""
        known = isinstance(error, HoldfastError)
        text = str(error) if known else f"{type(error).__name__}: {error}"
        with self._change:
            self._progress.reason = text
        fenced = isinstance(error, FencedError)
        if not self._has_failed or (fenced and not self._is_fenced):
            self._emit(UploadFailed(key, text, step=step_of(key)))
        self._has_failed, self._is_fenced = True, self._is_fenced or fenced
