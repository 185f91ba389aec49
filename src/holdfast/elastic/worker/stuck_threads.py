"""Whether the thread that trains sleeps where ranks wait for each other.

Its agent is told so while it gets no further: of two ranks of a replica that stand at the same
point, one hangs and the other waits for it, and only the one that hangs is to be named.

A thread may also wait for a message which never comes whole: only its process's end ends that.

`parallel/comm/abortable_wait.py` says how that comes about. Between replicas an errand is left
behind, and the state lives on. Inside a replica it is torch's own operations that wait, or ours a
hundred times a step; there a rank is of no use anyway once one of them is gone, and its state is
elsewhere.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

import holdfast.parallel
import holdfast.train

BUSY = 0.1
"""Of a core: who uses more of it than its own small threads do computes, and comes back."""
_LOOKS = 10
_NEAR = 0.5
"""Seconds around the moment when a trace is due in which it may be being written."""
_LATE = 0.2  # seconds: who looks so late was kept from running, and so was whom he looks at
_ROOMS = tuple(
    f"{Path(str(module.__file__)).parent}/" for module in (torch, holdfast.parallel, holdfast.train)
)


@dataclass(frozen=True)
class Who:
    """A thread, as the interpreter calls it and as the operating system does. (What `threading`
    says of the latter is the parent's after a fork.)"""

    identity: int
    native: int

    @staticmethod
    def me() -> Who:
        return Who(threading.get_ident(), threading.get_native_id())


class Sleeper:
    """Looks at a thread now and then."""

    def __init__(self, thread: Who) -> None:
        self._thread = thread
        self._before: tuple[int, int] | None = None

    def asleep(self) -> bool:
        """Whether it sleeps in one operation of torch or between ranks, now as when it was looked
        at last. False where nobody can say: a device computes unseen."""
        place = _place(self._thread.identity)
        same, self._before = place is not None and place == self._before, place
        return same and _sleeps(self._thread.native) and not _on_a_device()


class Trace:
    """The log says where all threads stand, unless that is called off within so many seconds.

    A thread of faulthandler's writes it, which needs no interpreter. But whoever calls it off while
    it is being written, or arms the next one, waits for its end, and holds the interpreter: where
    the log's disk hangs the whole process would. So from when it is due nobody does, until the same
    log has taken something else.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._due: float | None = None

    def arm(self) -> None:
        """Begin to count, anew where it was armed."""
        with self._lock:
            if self._near:
                return
            faulthandler.dump_traceback_later(self._seconds, file=2)
            due = self._due = time.monotonic() + self._seconds
        threading.Thread(target=self._follow, args=(due,), name="trace", daemon=True).start()

    def call_off(self) -> None:
        with self._lock:
            if self._due is not None and not self._near:
                faulthandler.cancel_dump_traceback_later()
                self._due = None

    @property
    def _near(self) -> bool:
        return self._due is not None and time.monotonic() > self._due - _NEAR

    def _follow(self, due: float) -> None:
        threading.Event().wait(max(0.0, due + _NEAR - time.monotonic()))
        if self._due == due:
            with suppress(OSError):  # a disk may be full
                os.write(2, b"was told to stop and is not back: its threads stand as above\n")
            with self._lock:
                self._due = None


def stuck(threads: Sequence[Who], seconds: float) -> bool:
    """Whether one of these threads sleeps in one operation of torch or between ranks for so long,
    and the process computes nothing meanwhile. Takes these seconds in any case. False where nobody
    can say: a device computes unseen, and one that was stopped, or waits for a core or a disk, does
    not sleep."""
    known = not _on_a_device()
    places, used = {thread: _place(thread.identity) for thread in threads}, time.process_time()
    asleep = {thread for thread, place in places.items() if place is not None}
    for _ in range(_LOOKS):
        due = time.monotonic() + seconds / _LOOKS
        threading.Event().wait(seconds / _LOOKS)
        late = time.monotonic() - due > _LATE
        known = known and not late
        asleep = {thread for thread in asleep if _sleeps(thread.native)}
    busy = time.process_time() - used > BUSY * seconds
    still = any(_place(thread.identity) == places[thread] for thread in asleep)
    return known and still and not busy


def _on_a_device() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _place(thread: int) -> tuple[int, int] | None:
    """Where it is, if that is in one of the rooms that communicate."""
    frame = sys._current_frames().get(thread)
    if frame is None or not frame.f_code.co_filename.startswith(_ROOMS):
        return None
    return id(frame), frame.f_lasti


def _sleeps(native: int) -> bool:
    """What the operating system says of it."""
    try:
        line = Path(f"/proc/self/task/{native}/stat").read_bytes()
    except OSError:
        return False
    return line.rpartition(b") ")[2].startswith(b"S")
