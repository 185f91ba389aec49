"""What a worker tells the C library's allocator before it trains on a CPU."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # <malloc.h>
_LARGEST_MMAP_THRESHOLD = 32 * 1024 * 1024  # bytes; glibc refuses more


def keep_freed_memory() -> bool:
    """Let the process keep what it frees, for the next step to use. Returns whether it will.

    Every step asks for the same activations and gradients again. When they are freed, glibc may
    give the end of its heap back to the kernel; it depends on what lies there. The next step then
    pays for each page with a fault: up to 3 % of a step of a small pipeline. With this the
    process stays at its peak, which it reaches in every step anyway. Blocks of 32 MiB and more are
    mapped one by one and still go back.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is None:
        return False
    keep = ctypes.c_int(-1)
    return bool(
        mallopt(_MMAP_THRESHOLD, ctypes.c_int(_LARGEST_MMAP_THRESHOLD))
        and mallopt(_TRIM_THRESHOLD, keep)
    )
