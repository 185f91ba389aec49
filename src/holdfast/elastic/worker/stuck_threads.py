"""Detects whether the training thread sleeps where ranks wait for each other.

The worker reports this to its agent while it makes no progress. If two ranks of a replica are at
the same point, one hangs and the other waits for it. Only the hung rank may be named.

A thread may also wait for a message that never arrives completely: only the end of the process ends
that. `parallel/comm/abortable_wait.py` gives the cause. Between replicas the wait is abandoned, and
the state lives on. Inside a replica the waits are in torch's own operations, or in ours a hundred
times a step. There a rank is useless once one member is lost, and its state is elsewhere.
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
from typing import Any

import psutil
import torch

BUSY_CORE_SHARE = 0.1
"""Share of a core. A process that uses more, beyond its own small threads, computes and will
return."""
_SAMPLES = 10
_DUMP_MARGIN_S = 0.5  # seconds around the time of a stack dump in which it may be being written
# seconds: who looks so late was kept from running, and so was whom he looks at
_LATE_SAMPLE_S = 0.2
_ROOMS = Path(__file__).parents[2]
_COMMUNICATING_FOLDERS = tuple(
    f"{folder}/"
    for folder in (Path(torch.__file__).parent, _ROOMS / "parallel", _ROOMS / "training")
)


@dataclass(frozen=True)
class ThreadId:
    """A thread's numbers in the interpreter and in the operating system. (After a fork, `threading`
    still gives the parent's number for the latter.)"""

    ident: int
    native_id: int

    @staticmethod
    def current() -> ThreadId:
        return ThreadId(threading.get_ident(), threading.get_native_id())


class ThreadWatcher:
    """Observes a thread from time to time."""

    def __init__(self, thread: ThreadId) -> None:
        self._thread = thread
        self._last_position: tuple[int, int] | None = None

    def is_asleep(self) -> bool:
        """Return True if the thread sleeps in one operation of torch or between ranks, now as at
        the last call.

        Return False if that is unknown: a device computes unseen.
        """
        place = _frame_position(self._thread.ident)
        same, self._last_position = place is not None and place == self._last_position, place
        return same and _is_sleeping(self._thread.native_id) and not _uses_device()


class StackDumpTimer:
    """Writes the stacks of all threads to the log, unless it is cancelled in time.

    A thread of faulthandler writes them, which needs no interpreter. But cancelling during the
    write, or arming again, waits for its end and holds the interpreter. If the log's disk hangs,
    all of the process would hang. So once the dump is due, no caller cancels or arms it until the
    same log has taken another line.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._due_at: float | None = None

    def arm(self) -> None:
        """Start the timer, or restart it if it runs."""
        with self._lock:
            if self._may_be_writing:
                return
            faulthandler.dump_traceback_later(self._seconds, file=2)
            due = self._due_at = time.monotonic() + self._seconds
        threading.Thread(
            target=self._mark_after_dump, args=(due,), name="trace", daemon=True
        ).start()

    def cancel(self) -> None:
        with self._lock:
            if self._due_at is not None and not self._may_be_writing:
                faulthandler.cancel_dump_traceback_later()
                self._due_at = None

    @property
    def _may_be_writing(self) -> bool:
        return self._due_at is not None and time.monotonic() > self._due_at - _DUMP_MARGIN_S

    def _mark_after_dump(self, due: float) -> None:
        threading.Event().wait(max(0.0, due + _DUMP_MARGIN_S - time.monotonic()))
        if self._due_at == due:
            with suppress(OSError):  # a disk may be full
                os.write(2, b"was halted and has not stopped: its threads are as above\n")
            with self._lock:
                self._due_at = None


def is_any_stuck(threads: Sequence[ThreadId], seconds: float) -> bool:
    """Return True if one of these threads sleeps in one operation of torch or between ranks all the
    time.

    The process must also compute nothing meanwhile. The call takes `seconds` in any case. Return
    False if the answer is unknown. A device computes unseen; a thread that was stopped, or waits
    for a core or a disk, does not sleep.
    """
    known = not _uses_device()
    places = {thread: _frame_position(thread.ident) for thread in threads}
    used = time.process_time()
    asleep = {thread for thread, place in places.items() if place is not None}
    for _ in range(_SAMPLES):
        due = time.monotonic() + seconds / _SAMPLES
        threading.Event().wait(seconds / _SAMPLES)
        late = time.monotonic() - due > _LATE_SAMPLE_S
        known = known and not late
        asleep = {thread for thread in asleep if _is_sleeping(thread.native_id)}
    busy = time.process_time() - used > BUSY_CORE_SHARE * seconds
    still = any(_frame_position(thread.ident) == places[thread] for thread in asleep)
    return known and still and not busy


def _uses_device() -> bool:
    """Return True if a device computes for this process, which no thread of it shows."""
    found = torch.accelerator.current_accelerator()
    if found is None:
        return False
    module: Any = torch.get_device_module(found)
    return bool(getattr(module, "is_initialized", module.is_available)())


def _frame_position(thread: int) -> tuple[int, int] | None:
    """Return the thread's position, if it is in one of the packages that communicate."""
    frame = sys._current_frames().get(thread)
    if frame is None or not frame.f_code.co_filename.startswith(_COMMUNICATING_FOLDERS):
        return None
    return id(frame), frame.f_lasti


def _is_sleeping(native: int) -> bool:
    """Return True if the operating system reports the thread as sleeping."""
    try:
        return psutil.Process(native).status() == psutil.STATUS_SLEEPING
    except psutil.Error:
        return False
