"""Whether the thread that trains sleeps where ranks wait for each other.

Its agent is told so while it gets no further: of two ranks of a replica that stand at the same
point, one hangs and the other waits for it, and only the one that hangs is to be named.

A thread may also wait for a message which never comes whole: only its process's end ends that.

`parallel/errand.py` says how that comes about. Between replicas an errand is left behind, and the
state lives on. Inside a replica it is torch's own operations that wait, or ours a hundred times a
step; there a rank is of no use anyway once one of them is gone, and its state is elsewhere.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import holdfast.parallel
import holdfast.train

BUSY = 0.1
"""Of a core: who uses more of it than its own small threads do computes, and comes back."""
_LOOKS = 10
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
