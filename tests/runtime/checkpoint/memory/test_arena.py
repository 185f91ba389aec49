"""Arenas: a torn slot reads as torn, and the other slot stays intact."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from holdfast.checkpoint.memory.arena import PAGE, Arena, SlotHeader, identity_digest
from holdfast.errors import CorruptError, HoldfastError

RUN, LAYOUT = identity_digest("run"), identity_digest(b"header")


@pytest.fixture
def fd() -> Iterator[int]:
    made = Arena.create("test", 2, 3 * PAGE)
    yield made
    os.close(made)


def fill(arena: Arena, slot: int, step: int, byte: int) -> SlotHeader:
    arena.begin_write(slot)
    arena.data(slot, 2 * PAGE)[:] = bytes([byte]) * (2 * PAGE)
    return arena.finish_write(slot, RUN, 1, step, 2 * PAGE, LAYOUT)


def test_a_snapshot_goes_across(fd: int) -> None:
    worker, mover = Arena(fd), Arena(fd)
    assert mover.header(0) is None  # never written
    made = fill(worker, 0, 5, 7)
    assert mover.header(0) == made
    assert made.sequence % 2 == 0
    assert mover.is_held(0)
    with mover.reading(0, made) as data:
        assert bytes(data) == b"\7" * (2 * PAGE)
    mover.release(0)
    assert worker.free_slot() == 1  # the one whose bytes are older


def test_slots_take_turns_and_held_ones_are_left_alone(fd: int) -> None:
    arena = Arena(fd)
    fill(arena, 0, 1, 1)
    assert arena.free_slot() == 1
    fill(arena, 1, 2, 2)
    assert arena.free_slot() is None
    with pytest.raises(RuntimeError, match="being read"):
        arena.begin_write(0)
    arena.release(0)
    assert arena.free_slot() == 0


def test_a_worker_killed_in_mid_copy_leaves_the_other_slot_valid(fd: int) -> None:
    arena = Arena(fd)
    good = fill(arena, 0, 1, 1)
    old = fill(arena, 1, 2, 2)
    arena.release(1)
    child = os.fork()
    if child == 0:  # a real worker, killed when half of the bytes are there
        mine = Arena(fd)
        mine.begin_write(1)
        mine.data(1, PAGE)[:] = b"\3" * PAGE
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert arena.header(1) is None
    with pytest.raises(CorruptError, match="does not hold step 2"), arena.reading(1, old):
        pass
    with arena.reading(0, good) as data:
        assert bytes(data) == b"\1" * (2 * PAGE)
    again = fill(arena, 1, 3, 4)  # the next worker may use the slot
    assert arena.header(1) == again


def test_a_slot_that_changes_while_it_is_read_is_noticed(fd: int) -> None:
    mover, worker = Arena(fd), Arena(fd)
    made = fill(worker, 0, 1, 1)

    def read() -> None:
        with mover.reading(0, made):
            mover.release(0)  # what must not happen
            fill(worker, 0, 2, 2)

    with pytest.raises(CorruptError, match="changed while step 1 was read"):
        read()


def test_a_flipped_bit_in_the_header_reads_as_torn(fd: int) -> None:
    arena = Arena(fd)
    fill(arena, 0, 1, 1)
    start = PAGE
    for at in range(start, start + 88):
        arena.memory[at] ^= 1
        assert arena.header(0) is None, at - start
        arena.memory[at] ^= 1
    assert arena.header(0) is not None


def test_what_is_no_arena_is_refused() -> None:
    fd = os.memfd_create("other")
    with pytest.raises(CorruptError):
        Arena(fd)
    os.ftruncate(fd, 3 * PAGE)
    with pytest.raises(CorruptError):
        Arena(fd)
    os.close(fd)


def test_no_memory_is_one_sentence_and_is_known_before_it_is_taken() -> None:
    """Allocating until it fails would wake the kernel's killer."""
    with pytest.raises(HoldfastError, match=r"no memory for an arena .* are available"):
        Arena.create("huge", 2, 2**60)
