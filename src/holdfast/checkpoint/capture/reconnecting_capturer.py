"""A capturer that outlives its mover. A mover that dies or hangs costs saves, but neither a step of
training nor the run.

    connected --a request fails, or no slot comes free--> away --the mover answers--> connected
                                                           '--another one took its place, and has
                                                              made an arena--> connected (to that)

A thread of its own talks to the mover, so neither training nor reporting waits for a mover that
hangs. While the mover is away, nothing is captured. The vote of each step says that this rank has
no free slot (`ready`), so the other ranks capture nothing either. A save that was under way fails.
If it was not handed over, it is reported as skipped. If it was, the new mover is notified of it and
reports its outcome (`unheard`).

The training thread takes the new arena over, in `ready`. So the arena never changes between the
vote and the capture.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from holdfast.checkpoint.capture.chunked_copy import (
    ChunkedCopy,
    CompletedCapture,
    CopyListener,
    SkippedCapture,
)
from holdfast.errors import FencedError, HoldfastError

MOVER_RETRY_DELAYS_S = (0.05, 0.1, 0.2, 0.5, 1.0)
"""Between two attempts to find a mover."""
MOVER_CHECK_INTERVAL_S = 1.0
"""Least seconds between two checks whether the mover that a rank waits for is still the same."""
CLOSE_FLUSH_TIMEOUT_S = 2.0
"""Seconds to wait at the end for queued hand-overs."""
MOVER_REPLACEMENT_TIMEOUT_S = 20.0
"""A capture that must not be skipped waits so long for a mover that is away."""
COMMIT_POLL_S = 2.0
MAX_REMEMBERED_SAVES = 4
"""Durable saves remembered that were handed over: as many as a rank can have under way."""

_MOVER_GONE = "its mover had exited before it was handed over"


class CapturerProtocol(Protocol):
    """The interface of the wrapped object: `capture.Capturer`."""

    @property
    def nbytes(self) -> int: ...
    def has_free_slot(self) -> bool: ...
    def is_connected(self) -> bool: ...
    def report_orphaned_saves(self, steps: Sequence[int]) -> None: ...
    def begin(self, step: int, wait: float = 0.0) -> ChunkedCopy | SkippedCapture: ...
    def capture(self, step: int, wait: float = 0.0) -> CompletedCapture | SkippedCapture: ...
    def fence(self) -> float: ...
    def call_when_copied(self, step: int, listener: CopyListener) -> None: ...
    def announce(
        self,
        step: int,
        meta: Mapping[str, Any],
        is_durable: bool = True,
        to_peers: bool | None = None,
        to_bucket: bool = True,
    ) -> SkippedCapture | None: ...
    def drop_capture(self, step: int) -> None: ...
    def poll_save_end(self, step: int, wait_s: float) -> tuple[bool, str | None]: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class _Announcement:
    """One announcement on its way."""

    capturer: CapturerProtocol
    step: int
    meta: Mapping[str, Any]
    is_durable: bool
    to_peers: bool | None
    to_bucket: bool

    def hand_over(self) -> SkippedCapture | None:
        """Make it; return why the mover has not taken it over, or None. Raises FencedError."""
        try:
            return self.capturer.announce(
                self.step, self.meta, self.is_durable, self.to_peers, self.to_bucket
            )
        except FencedError:
            raise
        except Exception as error:  # our own bug costs a save, and no more
            return SkippedCapture(self.step, f"{type(error).__name__}: {error}")


class ReconnectingCapturer:
    """As `Capturer`, whose part of the interface belongs to the training thread here, too;
    `announce`, `flush` and `wait_until_committed` may be called by another one."""

    def __init__(
        self,
        capturer: CapturerProtocol,
        make_capturer: Callable[[], CapturerProtocol],
        on_skipped: Callable[[SkippedCapture], None],
    ) -> None:
        """make_capturer: another one, of the same state, for the mover that is there now; called on
        a thread of ours. on_skipped: told, on that thread, of each capture that was not handed
        over."""
        self._capturer, self._make_capturer, self._on_skipped = capturer, make_capturer, on_skipped
        self._change = threading.Condition()
        self._replacement: CapturerProtocol | None = None
        self._queue: deque[_Announcement] = deque()
        self._is_handing_over = False  # on one that has left the queue
        self._is_away = self._is_suspected = self._is_closed = self._is_fenced = False
        self._checked_at = time.monotonic()
        self._durable_steps: deque[int] = deque(maxlen=MAX_REMEMBERED_SAVES)
        self._skip_reasons: dict[int, str] = {}  # steps that were not handed over, and why
        threading.Thread(target=self._talk_to_mover, name="to the mover", daemon=True).start()

    @property
    def nbytes(self) -> int:
        return self._capturer.nbytes

    @property
    def is_away(self) -> bool:
        """Return True if there is no mover to capture for."""
        with self._change:
            return self._is_away or self._is_fenced

    # --- the training thread --------------------------------------------------------------------
    def has_free_slot(self) -> bool:
        with self._change:
            fresh, self._replacement = self._replacement, None
            old = self._capturer
            if fresh is not None:
                self._capturer, self._is_away = fresh, False
                self._change.notify_all()
        if fresh is not None:
            old.close()
        with self._change:
            if self._is_away or self._is_fenced:
                return False
            if self._capturer.has_free_slot():
                return True
            self._suspect_if_due()
            return False

    def begin(self, step: int, wait: float = 0.0) -> ChunkedCopy | SkippedCapture:
        if (skipped := self._skip_if_away(step, wait)) is not None:
            return skipped
        return self._capturer.begin(step, wait)

    def capture(self, step: int, wait: float = 0.0) -> CompletedCapture | SkippedCapture:
        if (skipped := self._skip_if_away(step, wait)) is not None:
            return skipped
        return self._capturer.capture(step, wait)

    def fence(self) -> float:
        return self._capturer.fence()

    def call_when_copied(self, step: int, listener: CopyListener) -> None:
        self._capturer.call_when_copied(step, listener)

    def drop_capture(self, step: int) -> None:
        self._capturer.drop_capture(step)

    def close(self) -> None:
        """Close as `Capturer.close` does. Announced saves are handed over before, if that is
        quick."""
        self.flush(CLOSE_FLUSH_TIMEOUT_S)
        with self._change:
            self._is_closed = True
            fresh, self._replacement = self._replacement, None
            self._change.notify_all()
        if fresh is not None:
            fresh.close()
        self._capturer.close()

    def _skip_if_away(self, step: int, wait: float) -> SkippedCapture | None:
        """Return why nothing can be captured. If asked, wait for a mover that is away. The mover
        may have been replaced since the last capture, long ago. A capture that must not be skipped
        checks that."""
        end = time.monotonic() + min(wait, MOVER_REPLACEMENT_TIMEOUT_S)
        if wait > 0:
            with self._change:
                self._is_suspected = True
                self._change.notify_all()
                self._change.wait_for(
                    lambda: not self._is_suspected or self._is_away, MOVER_REPLACEMENT_TIMEOUT_S
                )
        while self.is_away and not self._is_fenced and (left := end - time.monotonic()) > 0:
            with self._change:
                self._change.wait_for(
                    lambda: self._replacement is not None or not self._is_away, left
                )
            self.has_free_slot()
        return SkippedCapture(step, "the mover is away") if self.is_away else None

    # --- handing over ---------------------------------------------------------------------------
    def announce(
        self,
        step: int,
        meta: Mapping[str, Any],
        is_durable: bool = True,
        to_peers: bool | None = None,
        to_bucket: bool = True,
    ) -> SkippedCapture | None:
        """Queue the call of `Capturer.announce`. Return None: a skipped save is reported later."""
        with self._change:
            self._queue.append(
                _Announcement(self._capturer, step, meta, is_durable, to_peers, to_bucket)
            )
            self._change.notify_all()
        return None

    def flush(self, timeout_s: float) -> bool:
        """Wait until what was announced has been handed over, or is lost; whether it has."""
        with self._change:
            return self._change.wait_for(
                lambda: not self._queue and not self._is_handing_over, timeout_s
            )

    def wait_until_committed(
        self, step: int, timeout_s: float, keep_alive: Callable[[], None] = lambda: None
    ) -> str | None:
        """Wait as `Capturer.wait_until_committed` does. If the mover is replaced meanwhile, the new
        one reports the outcome."""
        return _poll_until_ended(partial(self._poll_save_end, step), timeout_s, keep_alive)

    def _poll_save_end(self, step: int, wait_s: float) -> tuple[bool, str | None]:
        """Ask the mover once, or wait if there is no connection to a mover."""
        with self._change:
            self._change.wait_for(lambda: not self._queue and not self._is_handing_over, wait_s)
            if step in self._skip_reasons:
                return True, self._skip_reasons[step]
            if self._queue or self._is_handing_over:
                return False, None
            asked = self._replacement or (None if self._is_away else self._capturer)
            if asked is None:
                self._change.wait_for(
                    lambda: self._replacement is not None or not self._is_away, wait_s
                )
                return False, None
        try:
            ended, reason = asked.poll_save_end(step, wait_s)
        except FencedError:
            raise
        except HoldfastError:
            with self._change:
                self._mark_away()
            return False, None
        if not ended:
            with self._change:
                self._suspect_if_due()  # one that took its place does not know what it is asked for
        return ended, reason

    # --- the thread that speaks to the mover ----------------------------------------------------
    def _suspect_if_due(self) -> None:
        if time.monotonic() - self._checked_at >= MOVER_CHECK_INTERVAL_S:
            self._is_suspected = True
            self._change.notify_all()

    def _mark_away(self) -> None:
        self._is_away = self._is_suspected = True
        self._change.notify_all()

    def _talk_to_mover(self) -> None:
        failed = 0  # attempts to find a mover, in a row
        while True:
            with self._change:
                self._change.wait_for(lambda: self._is_closed or self._queue or self._is_suspected)
                if self._is_closed:
                    return
                handing = self._queue.popleft() if self._queue else None
                self._is_handing_over = handing is not None
            if handing is not None:
                self._hand_over(handing)
                with self._change:
                    self._is_handing_over = False
                    self._change.notify_all()
                continue
            failed = 0 if self._find_mover() else failed + 1
            if failed:
                with self._change:
                    pause = MOVER_RETRY_DELAYS_S[min(failed, len(MOVER_RETRY_DELAYS_S)) - 1]
                    self._change.wait_for(lambda: self._is_closed or self._queue, pause)

    def _hand_over(self, announcement: _Announcement) -> None:
        step, gone = announcement.step, None
        with self._change:
            if self._is_away or self._is_fenced or announcement.capturer is not self._capturer:
                gone = SkippedCapture(step, _MOVER_GONE)
        if gone is not None:
            announcement.capturer.drop_capture(step)
        else:
            try:
                gone = announcement.hand_over()
            except FencedError:
                with self._change:
                    self._is_fenced = True
                return  # the generation is over, and with it its snapshots
        with self._change:
            if gone is not None:
                self._skip_reasons[step] = gone.reason
                while len(self._skip_reasons) > MAX_REMEMBERED_SAVES:
                    del self._skip_reasons[min(self._skip_reasons)]
                self._mark_away()
            elif announcement.is_durable:
                self._durable_steps.append(step)
        if gone is not None:
            self._on_skipped(gone)

    def _find_mover(self) -> bool:
        """Look for the mover; whether there is one, the same or another."""
        with self._change:
            now = self._replacement or self._capturer
        fresh: CapturerProtocol | None = None
        try:
            if not now.is_connected():
                fresh = self._make_capturer()
                fresh.report_orphaned_saves(list(self._durable_steps))
        except FencedError:
            with self._change:
                self._is_fenced, self._is_suspected = True, False
                self._change.notify_all()
            return True
        except Exception:  # it is not up yet, or does not know the generation
            with self._change:
                self._is_away = True
            if fresh is not None:
                fresh.close()
            return False
        with self._change:
            self._checked_at, self._is_suspected = time.monotonic(), False
            if fresh is None:
                self._is_away = self._replacement is not None
            elif not self._is_closed:
                self._is_away, self._replacement, fresh = True, fresh, self._replacement
                self._durable_steps.clear()
            self._change.notify_all()
        if fresh is not None:
            fresh.close()
        return True


def _poll_until_ended(
    poll: Callable[[float], tuple[bool, str | None]],
    timeout_s: float,
    keep_alive: Callable[[], None],
) -> str | None:
    """Ask until a save has ended; return None, or why it is not committed. `poll` waits so many
    seconds at most; `keep_alive` is called before each question."""
    end = time.monotonic() + timeout_s
    while True:
        keep_alive()
        left = max(0.0, end - time.monotonic())
        ended, reason = poll(min(left, COMMIT_POLL_S))
        if ended:
            return reason
        if not left:
            return f"not committed after {timeout_s:g} s"
