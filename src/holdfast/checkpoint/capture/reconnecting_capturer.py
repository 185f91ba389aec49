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
from typing import Any, Protocol

from holdfast.checkpoint.capture.chunked_copy import Captured, Copy, Listener, Skipped
from holdfast.errors import FencedError, HoldfastError

PAUSES = (0.05, 0.1, 0.2, 0.5, 1.0)
"""Between two attempts to find a mover."""
LOOK_SECONDS = 1.0
"""Least seconds between two checks whether the mover that a rank waits for is still the same."""
CLOSE_SECONDS = 2.0
"""Seconds to wait at the end for queued hand-overs."""
REPLACE_SECONDS = 20.0
"""A capture that must not be skipped waits so long for a mover that is away."""
SETTLE_SLICE = 2.0
KEPT = 4
"""Durable saves remembered that were handed over: as many as a rank can have under way."""

_GONE = "its mover had exited before it was handed over"


class Captures(Protocol):
    """The interface of the wrapped object: `capture.Capturer`."""

    @property
    def bytes(self) -> int: ...
    def ready(self) -> bool: ...
    def connected(self) -> bool: ...
    def unheard(self, steps: Sequence[int]) -> None: ...
    def begin(self, step: int, wait: float = 0.0) -> Copy | Skipped: ...
    def capture(self, step: int, wait: float = 0.0) -> Captured | Skipped: ...
    def fence(self) -> float: ...
    def after(self, step: int, listener: Listener) -> None: ...
    def announce(
        self, step: int, meta: Mapping[str, Any], durable: bool = True, copied: bool | None = None,
        uploaded: bool = True,
    ) -> Skipped | None: ...  # fmt: skip
    def drop(self, step: int) -> None: ...
    def ended(self, step: int, wait: float) -> tuple[bool, str | None]: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class _HandOver:
    """One announcement on its way."""

    capturer: Captures
    step: int
    meta: Mapping[str, Any]
    durable: bool
    copied: bool | None
    uploaded: bool


class ReconnectingCapturer:
    """As `Capturer`, whose part of the interface belongs to the training thread here, too;
    `announce`, `flush` and `settle` may be called by another one."""

    def __init__(
        self, first: Captures, make: Callable[[], Captures], skipped: Callable[[Skipped], None]
    ) -> None:
        """make: another one, of the same state, for the mover that is there now; called on a thread
        of ours. skipped: told, on that thread, of each capture that was not handed over."""
        self._now, self._make, self._skipped = first, make, skipped
        self._change = threading.Condition()
        self._fresh: Captures | None = None
        self._queue: deque[_HandOver] = deque()
        self._working = False  # on one that has left the queue
        self._away = self._suspected = self._closed = self._fenced = False
        self._looked = time.monotonic()
        self._durable: deque[int] = deque(maxlen=KEPT)
        self._lost: dict[int, str] = {}  # steps that were not handed over, and why
        threading.Thread(target=self._work, name="to the mover", daemon=True).start()

    @property
    def bytes(self) -> int:
        return self._now.bytes

    @property
    def away(self) -> bool:
        """Return True if there is no mover to capture for."""
        with self._change:
            return self._away or self._fenced

    # --- the training thread --------------------------------------------------------------------
    def ready(self) -> bool:
        with self._change:
            fresh, self._fresh = self._fresh, None
            old = self._now
            if fresh is not None:
                self._now, self._away = fresh, False
                self._change.notify_all()
        if fresh is not None:
            old.close()
        with self._change:
            if self._away or self._fenced:
                return False
            if self._now.ready():
                return True
            self._look()
            return False

    def begin(self, step: int, wait: float = 0.0) -> Copy | Skipped:
        if (skipped := self._not_now(step, wait)) is not None:
            return skipped
        return self._now.begin(step, wait)

    def capture(self, step: int, wait: float = 0.0) -> Captured | Skipped:
        if (skipped := self._not_now(step, wait)) is not None:
            return skipped
        return self._now.capture(step, wait)

    def fence(self) -> float:
        return self._now.fence()

    def after(self, step: int, listener: Listener) -> None:
        self._now.after(step, listener)

    def drop(self, step: int) -> None:
        self._now.drop(step)

    def close(self) -> None:
        """Close as `Capturer.close` does. Announced saves are handed over before, if that is
        quick."""
        self.flush(CLOSE_SECONDS)
        with self._change:
            self._closed = True
            fresh, self._fresh = self._fresh, None
            self._change.notify_all()
        if fresh is not None:
            fresh.close()
        self._now.close()

    def _not_now(self, step: int, wait: float) -> Skipped | None:
        """Return why nothing can be captured. If asked, wait for a mover that is away. The mover
        may have been replaced since the last capture, long ago. A capture that must not be skipped
        checks that."""
        end = time.monotonic() + min(wait, REPLACE_SECONDS)
        if wait > 0:
            with self._change:
                self._suspected = True
                self._change.notify_all()
                self._change.wait_for(lambda: not self._suspected or self._away, REPLACE_SECONDS)
        while self.away and not self._fenced and (left := end - time.monotonic()) > 0:
            with self._change:
                self._change.wait_for(lambda: self._fresh is not None or not self._away, left)
            self.ready()
        return Skipped(step, "the mover is away") if self.away else None

    # --- handing over ---------------------------------------------------------------------------
    def announce(
        self, step: int, meta: Mapping[str, Any], durable: bool = True, copied: bool | None = None,
        uploaded: bool = True,
    ) -> Skipped | None:  # fmt: skip
        """Queue the call of `Capturer.announce`. Return None: a skipped save is reported later."""
        with self._change:
            self._queue.append(_HandOver(self._now, step, meta, durable, copied, uploaded))
            self._change.notify_all()
        return None

    def flush(self, seconds: float) -> bool:
        """Wait until what was announced has been handed over, or is lost; whether it has."""
        with self._change:
            return self._change.wait_for(lambda: not self._queue and not self._working, seconds)

    def settle(
        self, step: int, timeout: float, alive: Callable[[], None] = lambda: None
    ) -> str | None:
        """Wait as `Capturer.settle` does. If the mover is replaced meanwhile, the new one reports
        the outcome."""
        end = time.monotonic() + timeout
        while True:
            alive()
            left = max(0.0, end - time.monotonic())
            ended, reason = self._ended(step, min(left, SETTLE_SLICE))
            if ended:
                return reason
            if not left:
                return f"not committed after {timeout:g} s"

    def _ended(self, step: int, wait: float) -> tuple[bool, str | None]:
        """Ask the mover once, or wait if there is no connection to a mover."""
        with self._change:
            self._change.wait_for(lambda: not self._queue and not self._working, wait)
            if step in self._lost:
                return True, self._lost[step]
            if self._queue or self._working:
                return False, None
            asked = self._fresh or (None if self._away else self._now)
            if asked is None:
                self._change.wait_for(lambda: self._fresh is not None or not self._away, wait)
                return False, None
        try:
            ended, reason = asked.ended(step, wait)
        except FencedError:
            raise
        except HoldfastError:
            with self._change:
                self._suspect()
            return False, None
        if not ended:
            with self._change:
                self._look()  # one that took its place does not know what it is asked for
        return ended, reason

    # --- the thread that speaks to the mover ----------------------------------------------------
    def _look(self) -> None:
        if time.monotonic() - self._looked >= LOOK_SECONDS:
            self._suspected = True
            self._change.notify_all()

    def _suspect(self) -> None:
        self._away = self._suspected = True
        self._change.notify_all()

    def _work(self) -> None:
        failed = 0  # attempts to find a mover, in a row
        while True:
            with self._change:
                self._change.wait_for(lambda: self._closed or self._queue or self._suspected)
                if self._closed:
                    return
                handing = self._queue.popleft() if self._queue else None
                self._working = handing is not None
            if handing is not None:
                self._hand_over(handing)
                with self._change:
                    self._working = False
                    self._change.notify_all()
                continue
            failed = 0 if self._found() else failed + 1
            if failed:
                with self._change:
                    pause = PAUSES[min(failed, len(PAUSES)) - 1]
                    self._change.wait_for(lambda: self._closed or self._queue, pause)

    def _hand_over(self, handing: _HandOver) -> None:
        step, gone = handing.step, None
        with self._change:
            if self._away or self._fenced or handing.capturer is not self._now:
                gone = Skipped(step, _GONE)
        if gone is not None:
            handing.capturer.drop(step)
        else:
            try:
                gone = handing.capturer.announce(
                    step, handing.meta, handing.durable, handing.copied, handing.uploaded
                )
            except FencedError:
                with self._change:
                    self._fenced = True
                return  # the generation is over, and with it its snapshots
            except Exception as error:  # our own bug costs a save, and no more
                gone = Skipped(step, f"{type(error).__name__}: {error}")
        with self._change:
            if gone is not None:
                self._lost[step] = gone.reason
                while len(self._lost) > KEPT:
                    del self._lost[min(self._lost)]
                self._suspect()
            elif handing.durable:
                self._durable.append(step)
        if gone is not None:
            self._skipped(gone)

    def _found(self) -> bool:
        """Look for the mover; whether there is one, the same or another."""
        with self._change:
            now = self._fresh or self._now
        fresh: Captures | None = None
        try:
            if not now.connected():
                fresh = self._make()
                fresh.unheard(list(self._durable))
        except FencedError:
            with self._change:
                self._fenced, self._suspected = True, False
                self._change.notify_all()
            return True
        except Exception:  # it is not up yet, or does not know the generation
            with self._change:
                self._away = True
            if fresh is not None:
                fresh.close()
            return False
        with self._change:
            self._looked, self._suspected = time.monotonic(), False
            if fresh is None:
                self._away = self._fresh is not None
            elif not self._closed:
                self._away, self._fresh, fresh = True, fresh, self._fresh
                self._durable.clear()
            self._change.notify_all()
        if fresh is not None:
            fresh.close()
        return True
