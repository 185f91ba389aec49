"""Locked host memory through which a device's tensors travel, and the copies into it and back.

A copy runs on a stream of its own. It begins after what the calling thread has given to the device
so far. A copy to the host ends before `take_out` returns, because gloo reads the memory. After a
copy to the device, the calling thread's stream waits for it, and the host does not.

Buffers are kept by their size. A `Buffer` gives its memory back when nothing refers to it any more.
Another copy takes the memory once the device has read it.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from holdfast.core.devices import device_kind

_MIN_BYTES = 4096  # of a buffer


def rounded_bytes(nbytes: int) -> int:
    """Return the bytes of the buffer for so many: at most a quarter more, so that messages of
    nearly one size share buffers."""
    if nbytes <= _MIN_BYTES:
        return _MIN_BYTES
    quarter = 1 << (nbytes.bit_length() - 3)
    return -(-nbytes // quarter) * quarter


class Buffer:
    """Memory of an arena in the shape of a tensor. read_by: an event after which the device has
    read it; None: it does not read it."""

    def __init__(self, arena: BufferArena, memory: Tensor, like: Tensor) -> None:
        self._arena, self._memory = arena, memory
        self.tensor = memory[: like.nbytes].view(like.dtype).view(like.shape)
        self.read_by: Any = None

    def __del__(self) -> None:
        self._arena.give_back(self._memory, self.read_by)


class BufferArena:
    """Buffers of one group. is_locked: the driver locks their pages."""

    def __init__(self, is_locked: bool) -> None:
        self._is_locked = is_locked
        self._free: dict[int, deque[tuple[Tensor, Any]]] = {}
        self.made_bytes = 0  # of all buffers that were ever made

    def take(self, like: Tensor) -> Buffer:
        """Return a buffer for a tensor's content. Any thread may call it."""
        size = rounded_bytes(like.nbytes)
        free = self._free.setdefault(size, deque())
        for _ in range(len(free)):
            try:
                memory, read_by = free.popleft()
            except IndexError:  # another thread took it
                break
            if read_by is None or read_by.query():
                return Buffer(self, memory, like)
            free.append((memory, read_by))
        self.made_bytes += size
        return Buffer(self, torch.empty(size, dtype=torch.uint8, pin_memory=self._is_locked), like)

    def give_back(self, memory: Tensor, read_by: Any) -> None:
        """Take memory back. A collection of garbage may call it at any point: it takes no lock."""
        self._free[memory.nbytes].append((memory, read_by))


class HostCopies:
    """Copies between one type of device and an arena. device_type: "cpu" copies at once."""

    def __init__(self, device_type: str) -> None:
        kind = device_kind(device_type)
        self._is_host = kind.is_host
        self.arena = BufferArena(is_locked=kind.pins_batches and not kind.is_host)
        self._stream: Any = None

    def take_out(self, tensor: Tensor) -> Buffer:
        """Return a buffer with a tensor's content."""
        buffer = self.arena.take(tensor)
        self._copy(buffer.tensor, tensor, tensor.device)
        if not self._is_host:
            self._stream.record_event().synchronize()
        return buffer

    def put_back(self, buffer: Buffer, tensor: Tensor) -> None:
        """Copy a buffer's content into a tensor. What the calling thread gives to the device from
        now on comes after it."""
        self._copy(tensor, buffer.tensor, tensor.device)
        if not self._is_host:
            buffer.read_by = self._stream.record_event()
            torch.accelerator.current_stream(tensor.device).wait_event(buffer.read_by)

    def _copy(self, into: Tensor, source: Tensor, device: torch.device) -> None:
        with torch.no_grad():
            if self._is_host:
                into.copy_(source)
                return
            if self._stream is None:
                self._stream = torch.Stream(device)
            self._stream.wait_event(torch.accelerator.current_stream(device).record_event())
            with self._stream:
                into.copy_(source, non_blocking=True)
