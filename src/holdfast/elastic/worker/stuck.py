"""A thread that waits for a message which never comes whole: only its process's end ends that.

`parallel/errand.py` says how that comes about. Between replicas an errand is left behind, and the
state lives on. Inside a replica it is torch's own operations that wait, or ours a hundred times a
step; there a rank is of no use anyway once one of them is gone, and its state is elsewhere.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import torch

import holdfast.parallel
import holdfast.train

BUSY = 0.1
"""Of a core: who uses more of it than its own small threads do computes, and comes back."""
_ROOMS = tuple(
    f"{Path(str(module.__file__)).parent}/" for module in (torch, holdfast.parallel, holdfast.train)
)


def stuck(thread: int, seconds: float) -> bool:
    """Whether the thread of that identity stands in one operation of torch or between ranks for so
    long, and the process computes nothing meanwhile. A device computes unseen: False there."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    place, used = _place(thread), time.process_time()
    threading.Event().wait(seconds)
    busy = time.process_time() - used > BUSY * seconds
    return place is not None and place == _place(thread) and not busy


def _place(thread: int) -> tuple[int, int] | None:
    """Where it is, if that is in one of the rooms that communicate."""
    frame = sys._current_frames().get(thread)
    if frame is None or not frame.f_code.co_filename.startswith(_ROOMS):
        return None
    return id(frame), frame.f_lasti
