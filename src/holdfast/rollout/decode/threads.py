"""Threads of a step of decoding, without a change for the other threads of the process.

A kernel that several threads share treats the end of each share in another way, so its bits follow
from the number of threads. `torch.set_num_threads` sets the number for the whole process. A trainer
that generates while it trains would then train with other bits. So the number is set for one thread
alone, in the libraries that torch stands on.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch


@contextmanager
def serial_kernels() -> Iterator[None]:
    """Compute with one thread here. Products of MKL's strict mode have the same bits for any number
    of threads, so they keep those of the process."""
    before = torch.get_num_threads()  # a new thread gets the process's number by this call
    library = _library()
    if before == 1:
        yield
    elif library is None:
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)
    else:
        is_strict = "STRICT" in os.environ.get("MKL_CBWR", "").upper()
        products = library.MKL_Set_Num_Threads_Local(before if is_strict else 1)
        library.omp_set_num_threads(1)
        try:
            yield
        finally:
            library.omp_set_num_threads(before)
            library.MKL_Set_Num_Threads_Local(products)


@cache
def _library() -> Any:
    """Return what torch is linked with; None without OpenMP or MKL."""
    library = ctypes.CDLL(torch._C.__file__)
    names = "omp_set_num_threads", "MKL_Set_Num_Threads_Local"
    return library if all(hasattr(library, name) for name in names) else None
