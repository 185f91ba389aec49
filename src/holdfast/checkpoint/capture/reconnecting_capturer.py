"""A capturer that may come before its arena, and outlives its mover. A mover that dies or hangs
costs saves, but neither a step of training nor the run.

    connecting --the mover has made the first arena--> connected
    connected --a request fails, or no slot comes free--> away --the mover answers--> connected
                                                           '--another one took its place, and has
                                                              made an arena--> connected (to that)

A thread of its own talks to the mover, so neither training nor reporting waits for a mover that
hangs. While there is no mover, nothing is captured. The vote of each step says that this rank has
no free slot, so the other ranks capture nothing either. A save that was under way fails.
If it was not handed over, it is reported as skipped. If it was, the new mover is notified of it and
reports its outcome (`report_orphaned_saves`).

If training continues with its own state, no capture is due before its first step ends. So the
thread can also make the first arena, while that step computes. The training thread takes a new
arena over, in `has_free_slot`. So the arena never changes between the vote and the capture.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from holdfast.checkpoint.capture.chunked_copy import (
    ChunkedCopy,
    CompletedCapture,
    CopyListener,
    SkippedCapture,
)
from holdfast.checkpoint.mover.client import wait_until_ended
from holdfast.core.json_parsing import Json
from holdfast.errors import FencedError, HoldfastError
from holdfast.policy.saving.destinations import DURABLE, SaveDestinations

if TYPE_CHECKING:
    from holdfast.checkpoint.capture.capturer import Capturer
    from holdfast.checkpoint.capture.no_room_capturer import NoRoomCapturer

    AnyCapturer = Capturer | NoRoomCapturer

MOVER_RETRY_DELAYS_S = (0.05, 0.1, 0.2, 0.5, 1.0)
"""Between two attempts to find a mover."""
MOVER_CHECK_INTERVAL_S = 1.0
"""Least seconds between two checks whether the mover that a rank waits for is still the same."""
CLOSE_FLUSH_TIMEOUT_S = 2.0
"""Seconds to wait at the end for queued hand-overs."""
MOVER_REPLACEMENT_TIMEOUT_S = 20.0
"""A capture that must not be skipped waits so long for a mover that is away."""
FIRST_ARENA_TIMEOUT_S = 2.0
"""Seconds that the first vote waits for the first arena. Later votes do not wait for it."""
COMMIT_POLL_S = 2.0
MAX_REMEMBERED_SAVES = 4
"""Durable saves remembered that were handed over: as many as a rank can have under way."""

_MOVER_GONE = "its mover had exited before it was handed over"
_NO_ARENA = "the mover has made no arena"
_NO_ARENA_YET = f"{_NO_ARENA} yet"


@dataclass(frozen=True)
class _Announcement:
    """One announcement on its way."""

    capturer: AnyCapturer
    step: int
    meta: Mapping[str, Json]
    destinations: SaveDestinations

    def hand_over(self) -> SkippedCapture | None:
        """Make it; return why the mover has not taken it over, or None. Raises FencedError."""
        try:
            return self.capturer.announce(self.step, self.meta, self.destinations)
        except FencedError:
            raise
        except Exception as error:  # our own bug costs a save, and no more
            return SkippedCapture(self.step, f"{type(error).__name__}: {error}")


class ReconnectingCapturer:
    """As `Capturer`, whose part of the interface belongs to the training thread here, too;
    `announce`, `flush` and `wait_until_committed` may be called by another one."""

    def __init__(
        self,
        make_first: Callable[[], AnyCapturer],
        make_capturer: Callable[[], AnyCapturer],
        on_skipped: Callable[[SkippedCapture], None],
        *,
        in_background: bool = False,
    ) -> None:
        """make_first: makes the first capturer. in_background: it is called on a thread of ours,
        and its error is raised where a slot is asked for. make_capturer: another one, of the same
        state, for the mover that is there now; called on that thread. on_skipped: told, on that
        thread, of each capture that was not handed over."""
        self._make_first, self._make_capturer = make_first, make_capturer
        self._on_skipped = on_skipped
        self._capturer = None if in_background else make_first()
        self._change = threading.Condition()
        self._replacement: AnyCapturer | None = None  # for the training thread to take over
        self._is_connecting = in_background  # for the first time
        self._first_error: BaseException | None = None
        self._queue: deque[_Announcement] = deque()
        self._is_handing_over = False  # on one that has left the queue
        self._lacks_mover = in_background
        self._is_suspected = self._is_closed = self._is_fenced = False
        self._checked_at = time.monotonic()
        self._durable_steps: deque[int] = deque(maxlen=MAX_REMEMBERED_SAVES)
        self._skip_reasons: dict[int, str] = {}  # steps that were not handed over, and why
        self._first_wait_s = FIRST_ARENA_TIMEOUT_S
        threading.Thread(target=self._talk_to_mover, name="to the mover", daemon=True).start()

    @property
    def nbytes(self) -> int:
        return self._current.nbytes

    @property
    def is_away(self) -> bool:
        """Return True if there is no mover to capture for."""
        return self._lacks_mover or self._is_fenced

    @property
    def _current(self) -> AnyCapturer:
        if self._capturer is None:
            raise RuntimeError("nothing has been captured")
        return self._capturer

    @property
    def _can_return(self) -> bool:
        """Return True if there is no mover now, and there may be one later."""
        return self._lacks_mover and not self._is_fenced

    # --- the training thread --------------------------------------------------------------------
    def has_free_slot(self) -> bool:
        """Return True as `Capturer.has_free_slot` does. Raises what the first capturer's maker
        raised."""
        self._take_over(self._first_wait_s if self._capturer is None else 0.0)
        self._first_wait_s = 0.0
        with self._change:
            if self.is_away:
                return False
            if self._current.has_free_slot():
                return True
            self._suspect_if_due()
            return False

    def begin(self, step: int, wait: float = 0.0) -> ChunkedCopy | SkippedCapture:
        skipped = self._skip_if_away(step, wait)
        return self._current.begin(step, wait) if skipped is None else skipped

    def capture(self, step: int, wait: float = 0.0) -> CompletedCapture | SkippedCapture:
        skipped = self._skip_if_away(step, wait)
        return self._current.capture(step, wait) if skipped is None else skipped

    def fence(self) -> float:
        return 0.0 if self._capturer is None else self._capturer.fence()

    def call_when_copied(self, step: int, listener: CopyListener) -> None:
        self._current.call_when_copied(step, listener)

    def drop_capture(self, step: int) -> None:
        self._current.drop_capture(step)

    def close(self) -> None:
        """Close as `Capturer.close` does. Announced saves are handed over before, if that is
        quick. Wait until the first capturer is made, since it refers to the state."""
        self.flush(CLOSE_FLUSH_TIMEOUT_S)
        with self._change:
            self._is_closed = True
            self._change.notify_all()
            self._change.wait_for(lambda: not self._is_connecting)
            left, self._replacement = (self._replacement, self._capturer), None
        for capturer in left:
            if capturer is not None:
                capturer.close()

    def _skip_if_away(self, step: int, wait: float) -> SkippedCapture | None:
        """Return why nothing can be captured. If asked, wait for a mover that is away. The mover
        may have been replaced since the last capture, long ago. A capture that must not be skipped
        checks that."""
        if self._capturer is None:
            self._take_over(wait)
        elif wait > 0:
            end = time.monotonic() + min(wait, MOVER_REPLACEMENT_TIMEOUT_S)
            # Have it checked whether the mover is still the same, and wait until that is known.
            with self._change:
                self._is_suspected = True
                self._change.notify_all()
                self._change.wait_for(
                    lambda: not self._is_suspected or self._lacks_mover, MOVER_REPLACEMENT_TIMEOUT_S
                )
            while self._can_return and (left := end - time.monotonic()) > 0:
                self._take_over(left)
        reason = _NO_ARENA_YET if self._capturer is None else "the mover is away"
        return SkippedCapture(step, reason) if self.is_away else None

    def _take_over(self, wait_s: float) -> None:
        """Take the new capturer over, if there is one. If there is no mover, wait for that. Raises
        what the first capturer's maker raised."""
        with self._change:
            self._change.wait_for(
                lambda: self._replacement or self._first_error or not self._can_return, wait_s
            )
            if self._first_error is not None:
                raise self._first_error
            fresh, self._replacement = self._replacement, None
            if fresh is None:
                return
            old, self._capturer, self._lacks_mover = self._capturer, fresh, False
            self._change.notify_all()
        if old is not None:
            old.close()

    def _suspect_if_due(self) -> None:
        if time.monotonic() - self._checked_at >= MOVER_CHECK_INTERVAL_S:
            self._is_suspected = True
            self._change.notify_all()

    # --- handing over ---------------------------------------------------------------------------
    def announce(
        self, step: int, meta: Mapping[str, Json], destinations: SaveDestinations = DURABLE
    ) -> SkippedCapture | None:
        """Queue the call of `Capturer.announce`. Return None: a skipped save is reported later."""
        with self._change:
            self._queue.append(_Announcement(self._current, step, meta, destinations))
            self._change.notify_all()
        return None

    def flush(self, timeout_s: float) -> bool:
        """Wait until what was announced has been handed over, or is lost; whether it has."""
        with self._change:
            return self._wait_until_handed_over(timeout_s)

    def wait_until_committed(
        self, step: int, timeout_s: float, keep_alive: Callable[[], None] = lambda: None
    ) -> str | None:
        """Wait as `Capturer.wait_until_committed` does. If the mover is replaced meanwhile, the new
        one reports the outcome."""
        poll = partial(self.poll_save_end, step)
        return wait_until_ended(poll, timeout_s, keep_alive, COMMIT_POLL_S)

    def _wait_until_handed_over(self, timeout_s: float) -> bool:
        return self._change.wait_for(
            lambda: not self._queue and not self._is_handing_over, timeout_s
        )

    def poll_save_end(self, step: int, wait_s: float) -> tuple[bool, str | None]:
        """Ask the mover once, or wait if there is no connection to a mover. Return as
        `MoverClient.poll_save_end` does."""
        with self._change:
            if self._capturer is None and self._replacement is None:
                return True, _NO_ARENA
            is_handed_over = self._wait_until_handed_over(wait_s)
            if step in self._skip_reasons:
                return True, self._skip_reasons[step]
            if not is_handed_over:
                return False, None
            asked = self._replacement or (None if self._lacks_mover else self._capturer)
            if asked is None:
                self._change.wait_for(lambda: self._replacement or not self._lacks_mover, wait_s)
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
    def _mark_away(self) -> None:
        self._lacks_mover = self._is_suspected = True
        self._change.notify_all()

    def _talk_to_mover(self) -> None:
        if self._is_connecting and not self._connect():
            return
        failed = 0  # attempts to find a mover, in a row
        while True:
            with self._change:
                self._change.wait_for(lambda: self._is_closed or self._queue or self._is_suspected)
                if self._is_closed:
                    return
                announcement = self._queue.popleft() if self._queue else None
                self._is_handing_over = announcement is not None
            if announcement is not None:
                self._hand_over(announcement)
                with self._change:
                    self._is_handing_over = False
                    self._change.notify_all()
                continue
            failed = 0 if self._find_mover() else failed + 1
            if failed:
                with self._change:
                    pause = MOVER_RETRY_DELAYS_S[min(failed, len(MOVER_RETRY_DELAYS_S)) - 1]
                    self._change.wait_for(lambda: self._is_closed or self._queue, pause)

    def _connect(self) -> bool:
        """Make the first capturer; whether that worked. An error is the training thread's."""
        first, error = None, None
        try:
            first = self._make_first()
        except BaseException as raised:
            error = raised
        with self._change:
            self._replacement, self._first_error = first, error
            self._is_connecting = False
            self._change.notify_all()
        return error is None

    def _hand_over(self, announcement: _Announcement) -> None:
        step, skipped = announcement.step, None
        with self._change:
            if self.is_away or announcement.capturer is not self._capturer:
                skipped = SkippedCapture(step, _MOVER_GONE)
        if skipped is not None:
            announcement.capturer.drop_capture(step)
        else:
            try:
                skipped = announcement.hand_over()
            except FencedError:
                with self._change:
                    self._is_fenced = True
                return  # the generation is over, and with it its snapshots
        with self._change:
            if skipped is not None:
                self._skip_reasons[step] = skipped.reason
                while len(self._skip_reasons) > MAX_REMEMBERED_SAVES:
                    del self._skip_reasons[min(self._skip_reasons)]
                self._mark_away()
            elif announcement.destinations.is_durable:
                self._durable_steps.append(step)
        if skipped is not None:
            self._on_skipped(skipped)

    def _find_mover(self) -> bool:
        """Look for the mover; whether there is one, the same or another."""
        with self._change:
            now = self._replacement or self._current
        fresh: AnyCapturer | None = None
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
                self._lacks_mover = True
            if fresh is not None:
                fresh.close()
            return False
        with self._change:
            self._checked_at, self._is_suspected = time.monotonic(), False
            if fresh is None:
                self._lacks_mover = self._replacement is not None
            elif not self._is_closed:
                self._lacks_mover, self._replacement, fresh = True, fresh, self._replacement
                self._durable_steps.clear()
            self._change.notify_all()
        if fresh is not None:
            fresh.close()
        return True
