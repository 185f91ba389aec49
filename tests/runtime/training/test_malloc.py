"""What a step frees is there for the next one, without the kernel's help."""

from __future__ import annotations

import ctypes
import resource

import torch

from holdfast.training.memory.malloc import keep_freed_memory
from tests.support.ranks import RankContext, rank_values

MEGABYTES, BLOCKS, WARM, ROUNDS = 6, 4, 4, 8
MMAP_THRESHOLD = -3  # <malloc.h>


def _page_faults(rank: RankContext, keep: bool) -> int:
    """Of some rounds that allocate and free the same memory, once a few have.

    Whether glibc gives a heap's end back depends on what happens to lie there, so first it is
    told to give back everything.
    """
    ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 1 << 16)
    if keep:
        assert keep_freed_memory()
    for _ in range(WARM):
        _use()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(ROUNDS):
        _use()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def _use() -> None:
    blocks = [torch.ones(MEGABYTES << 20, dtype=torch.uint8) for _ in range(BLOCKS)]
    assert int(blocks[-1][-1]) == 1


def test_memory_that_was_freed_is_used_again_without_page_faults() -> None:
    (kept,) = rank_values(_page_faults, 1, {"keep": True})
    (given_back,) = rank_values(_page_faults, 1, {"keep": False})
    pages = ROUNDS * MEGABYTES * BLOCKS * (1 << 20) // resource.getpagesize()
    assert kept < pages / 100
    assert given_back > pages / 3  # what the first figure is held against
