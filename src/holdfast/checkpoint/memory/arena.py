"""Arenas: memory that the mover owns and a worker copies its state into.

One memory file (memfd) per rank: a page of arena header, then `slots` slots. A slot is a page of
slot header and room for one blob, byte for byte as it will lie on disk. The file is filled with
pages at the start: the first touch of fresh memory costs five times the copy itself.

A slot's header is written last and works as a seqlock. While bytes change, its sequence number is
odd, and a reader compares the header before and after. So a worker that is killed in the middle of
a copy leaves a slot that reads as dirty. The other slot stays untouched.

    FREE --begin--> WRITING (odd) --finish--> HELD (even) --release--> FREE

Only the worker takes a slot from FREE to HELD. Only the mover gives it back, when its bytes are
neither being read nor part of the newest complete step (`snapshot_store.py`). So a slot that is
needed is never overwritten: a capture that finds no free slot is skipped, and counted. A free
slot's bytes stay as they are until the worker takes it again.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest, xxh3_128_digest

from holdfast.core.json_parsing import JsonRow
from holdfast.errors import CorruptError, NoRoomError
from holdfast.machine import limits
from holdfast.machine.numa import prefer_numa_node

logger = logging.getLogger(__name__)

PAGE = 4096
ARENA_FORMAT = 1
_ARENA_MAGIC = b"HFARENA1"
_SLOT_MAGIC = b"HFSLOT_1"
_ARENA = struct.Struct("<8sIIQ")  # magic, format, slots, slot capacity in bytes
_SLOT = struct.Struct("<8sI4x16sQQQQ16s")  # magic, format, run, generation, step, sequence, length,
_CHECK = struct.Struct("<Q")  # layout | xxh3-64 of the header
_HOLD = struct.Struct("<Q")
_HOLD_OFFSET = 2048  # own cache line: 0 while the slot is free

FREE, HELD = 0, 1


@dataclass(frozen=True)
class SlotHeader(JsonRow):
    """The header of an intact slot. `layout` is a hash of the blob's header."""

    run: bytes
    generation: int
    step: int
    sequence: int
    length: int
    layout: bytes


def identity_digest(data: bytes | str) -> bytes:
    """16 bytes that stand for a run's name or a blob's header in a slot header."""
    return bytes(xxh3_128_digest(data.encode() if isinstance(data, str) else data))


def slot_capacity(blob_bytes: int) -> int:
    """Return the bytes of a slot's room for a blob, rounded up to pages."""
    return -(-max(blob_bytes, 1) // PAGE) * PAGE


class Arena:
    """The slots of one rank, mapped. Both sides use this class; `create` is the mover's."""

    def __init__(self, fd: int, *, write: bool = True) -> None:
        """Map the arena behind `fd`; one to write into with its pages present. The descriptor
        stays the caller's.

        Raises CorruptError when it is not an arena.
        """
        size = os.fstat(fd).st_size
        if size < PAGE:
            raise CorruptError("the memory file is not an arena")
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if write else 0)
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)
        self.memory = mmap.mmap(fd, size, flags, protection)
        magic, version, slots, capacity = _ARENA.unpack_from(self.memory, 0)
        if magic != _ARENA_MAGIC or size != PAGE + slots * (PAGE + capacity):
            raise CorruptError("the memory file is not an arena")
        if version != ARENA_FORMAT:
            raise CorruptError(f"the arena has format {version}, {ARENA_FORMAT} is ours")
        self.slots = int(slots)
        self.capacity = int(capacity)

    @staticmethod
    def create(name: str, slots: int, capacity: int, numa_node: int | None = None) -> int:
        """A new memory file with room for `slots` blobs of `capacity` bytes; its descriptor.
        numa_node: its pages come from there, as long as that has any; None: from anywhere.

        Raises NoRoomError when the machine has not that much memory.
        """
        size = PAGE + slots * (PAGE + capacity)
        room = limits.available_memory()
        if size > room:
            raise NoRoomError(
                f"no memory for an arena of {size} bytes ({slots} snapshots): {room} are available"
            )
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            if numa_node is not None:
                _prefer_node(fd, size, numa_node)
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            os.close(fd)
            raise NoRoomError(
                f"no memory for an arena of {size} bytes ({slots} snapshots): {error.strerror}"
            ) from error
        os.pwrite(fd, _ARENA.pack(_ARENA_MAGIC, ARENA_FORMAT, slots, capacity), 0)
        return fd

    def close(self) -> None:
        self.memory.close()

    def data_offset(self, slot: int) -> int:
        """Return the offset in the file at which a slot's blob begins."""
        return self._slot_offset(slot) + PAGE

    def data(self, slot: int, length: int) -> memoryview:
        """The first `length` bytes of a slot's blob."""
        start = self.data_offset(slot)
        return memoryview(self.memory)[start : start + length]

    # --- the worker's side ------------------------------------------------------------------
    def free_slot(self) -> int | None:
        """Return the free slot whose bytes are oldest; None when all are held."""
        free = [s for s in range(self.slots) if not self.is_held(s)]
        return min(free, key=lambda s: (self._read_sequence(s), s), default=None)

    def begin_write(self, slot: int) -> None:
        """Mark a slot dirty. Raises RuntimeError when it is held: that would be our own bug."""
        if self.is_held(slot):
            raise RuntimeError(f"slot {slot} is being read")
        sequence = self._read_sequence(slot)
        self._write_sequence(slot, sequence + 1 + sequence % 2)

    def finish_write(
        self, slot: int, run: bytes, generation: int, step: int, length: int, layout: bytes
    ) -> SlotHeader:
        """Write the header, and hold the slot until the mover releases it."""
        sequence = self._read_sequence(slot) + 1
        made = SlotHeader(run, generation, step, sequence, length, layout)
        fields = _SLOT.pack(
            _SLOT_MAGIC,
            ARENA_FORMAT,
            made.run,
            made.generation,
            made.step,
            made.sequence,
            made.length,
            made.layout,
        )
        packed = fields + _CHECK.pack(xxh3_64_intdigest(fields))
        _HOLD.pack_into(self.memory, self._slot_offset(slot) + _HOLD_OFFSET, HELD)
        base = self._slot_offset(slot)
        self.memory[base : base + len(packed)] = packed
        return made

    # --- the mover's side -------------------------------------------------------------------
    def is_held(self, slot: int) -> bool:
        (value,) = _HOLD.unpack_from(self.memory, self._slot_offset(slot) + _HOLD_OFFSET)
        return bool(value != FREE)

    def release(self, slot: int) -> None:
        """Give the slot back to the worker; its bytes stay readable until they are overwritten."""
        _HOLD.pack_into(self.memory, self._slot_offset(slot) + _HOLD_OFFSET, FREE)

    def header(self, slot: int) -> SlotHeader | None:
        """The slot's header; None when it is dirty, torn, or was never written."""
        base = self._slot_offset(slot)
        raw = self.memory[base : base + _SLOT.size + _CHECK.size]
        magic, version, run, generation, step, sequence, length, layout = _SLOT.unpack_from(raw)
        (check,) = _CHECK.unpack_from(raw, _SLOT.size)
        if magic != _SLOT_MAGIC or version != ARENA_FORMAT or sequence % 2:
            return None
        if check != xxh3_64_intdigest(raw[: _SLOT.size]) or length > self.capacity:
            return None
        return SlotHeader(run, generation, step, sequence, length, layout)

    @contextmanager
    def reading(self, slot: int, expected: SlotHeader) -> Iterator[memoryview]:
        """The bytes of a slot that holds `expected`, checked before and after.

        Raises CorruptError when the slot holds something else, or changed in the meantime.
        """
        if self.header(slot) != expected:
            raise CorruptError(f"slot {slot} does not hold step {expected.step}")
        view = self.data(slot, expected.length)
        try:
            yield view
        finally:
            view.release()
        if self.header(slot) != expected:
            raise CorruptError(f"slot {slot} changed while step {expected.step} was read")

    # --- fields -----------------------------------------------------------------------------
    def _slot_offset(self, slot: int) -> int:
        if not 0 <= slot < self.slots:
            raise IndexError(f"slot {slot} of {self.slots}")
        return PAGE + slot * (PAGE + self.capacity)

    def _sequence_offset(self, slot: int) -> int:
        return self._slot_offset(slot) + 8 + 8 + 16 + 16

    def _read_sequence(self, slot: int) -> int:
        (value,) = _CHECK.unpack_from(self.memory, self._sequence_offset(slot))
        return int(value)

    def _write_sequence(self, slot: int, value: int) -> None:
        _CHECK.pack_into(self.memory, self._sequence_offset(slot), value)


def _prefer_node(fd: int, size: int, node: int) -> None:
    """Let a memory file's pages come from a NUMA node. A refusal costs only speed."""
    os.ftruncate(fd, size)
    with mmap.mmap(fd, size, mmap.MAP_SHARED) as memory:
        start = ctypes.c_char.from_buffer(memory)
        try:
            prefer_numa_node(ctypes.addressof(start), size, node)
        except OSError as error:
            logger.warning(
                "the pages of an arena do not lie near its device, on NUMA node %d: %s", node, error
            )
        finally:
            del start  # the mapping cannot be closed before
