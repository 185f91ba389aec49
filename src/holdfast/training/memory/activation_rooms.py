"""Room for activations outside of the device: pieces of host memory, or of one file.

A piece is taken for what a block keeps, and given back when that is on its way to the device again.
The room grows to the most that was in use at once. A piece that was given back is used again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.config.sections.memory import FILE, HOST
from holdfast.training.memory.places import StateMemory, as_bytes
from holdfast.training.memory.scratch_file import ScratchFile
from holdfast.training.memory.transfers import LOADS, WAITED

KIND = "activations"


@dataclass(frozen=True, eq=False)
class Spot:
    """A piece of a room. start: its first byte in a file. host: its memory, if it is the host's."""

    start: int
    nbytes: int
    host: Tensor | None = None


class _Returns:
    """Pieces of a room that were given back."""

    def __init__(self, memory: StateMemory) -> None:
        self._memory = memory
        self._returned: deque[Spot] = deque()  # the garbage collector may give back at any moment

    def give(self, spot: Spot) -> None:
        """Take a piece back. What was asked of it before is still done first."""
        self._returned.append(spot)


class HostRoom(_Returns):
    """Buffers of the host, locked if an accelerator copies from them."""

    def __init__(self, memory: StateMemory) -> None:
        super().__init__(memory)
        self._free: list[Spot] = []

    def take(self, nbytes: int) -> Spot:
        """Return a piece of at least so many bytes: the smallest that is free, or a new one."""
        while self._returned:
            self._free.append(self._returned.popleft())
        fitting = [spot for spot in self._free if spot.nbytes >= nbytes]
        if fitting:
            found = min(fitting, key=lambda spot: spot.nbytes)
            self._free = [spot for spot in self._free if spot is not found]
            return found
        for spot in self._free:  # all are too small
            self._memory.ledger.add(HOST, KIND, -spot.nbytes)
        self._free.clear()
        self._memory.ledger.add(HOST, KIND, nbytes)
        return Spot(0, nbytes, self._memory.host_buffer(nbytes))

    def write(self, spot: Spot, offset: int, source: Tensor) -> None:
        """Copy bytes of the host to a place in a piece."""
        assert spot.host is not None
        spot.host[offset : offset + source.nbytes].copy_(source)

    def read(self, spot: Spot, offset: int, into: Tensor) -> None:
        """Fill bytes of the host from a place in a piece."""
        assert spot.host is not None
        into.copy_(spot.host[offset : offset + into.nbytes])


class FileRoom(_Returns):
    """One file, which grows. Raises StateMemoryError if it cannot, or if the disk fails."""

    def __init__(self, memory: StateMemory) -> None:
        super().__init__(memory)
        self._file: ScratchFile | None = None
        self._free: list[tuple[int, int]] = []  # (first byte, bytes) by rising first bytes

    def take(self, nbytes: int) -> Spot:
        """Return a piece of so many bytes: the first that fits, or a new one at the file's end."""
        self._take_back()
        for place, (start, size) in enumerate(self._free):
            if size >= nbytes:
                self._free[place : place + 1] = (
                    [(start + nbytes, size - nbytes)] if size > nbytes else []
                )
                return Spot(start, nbytes)
        start = 0 if self._file is None else self._file.extend(nbytes)
        self._file = self._file or self._memory.file(nbytes)
        self._memory.ledger.add(FILE, KIND, nbytes)
        return Spot(start, nbytes)

    def write(self, spot: Spot, offset: int, source: Tensor) -> None:
        """Write bytes of the host to a place in a piece."""
        assert self._file is not None
        self._file.write(as_bytes(source), spot.start + offset)

    def read(self, spot: Spot, offset: int, into: Tensor) -> None:
        """Fill bytes of the host from a place in a piece."""
        assert self._file is not None
        self._file.read(as_bytes(into), spot.start + offset)

    def _take_back(self) -> None:
        """Join what was given back with its neighbours."""
        while self._returned:
            spot = self._returned.popleft()
            self._free.append((spot.start, spot.nbytes))
        joined: list[tuple[int, int]] = []
        for start, size in sorted(self._free):
            if joined and sum(joined[-1]) == start:
                joined[-1] = joined[-1][0], joined[-1][1] + size
            else:
                joined.append((start, size))
        self._free = joined


Room = HostRoom | FileRoom


def make_room(memory: StateMemory) -> Room:
    """Return room in the place that the run file names."""
    return FileRoom(memory) if memory.place_of(KIND) == FILE else HostRoom(memory)


Ticket = Future[None] | torch.Event
"""What says that copies are done."""

Parts = list[tuple[Tensor, int]]
"""Tensors of bytes, and their places in a piece."""


class Copier:
    """Copies between the device and a room, in the order of the calls, while the caller computes.

    On an accelerator a stream of its own copies to and from locked memory. A thread does the rest:
    what a CPU copies, and files. (No machine with an accelerator has run the stream yet.)
    """

    def __init__(self, memory: StateMemory, room: Room) -> None:
        self._room, self._device, self._transfers = room, memory.device, memory.transfers
        on_host = memory.device.type == "cpu"
        self._stream = None if on_host else torch.Stream(memory.device)
        self._staging = None if on_host or isinstance(room, HostRoom) else HostRoom(memory)
        self._pool = ThreadPoolExecutor(1, "activations")

    def push(self, spot: Spot, parts: Parts) -> Ticket:
        """Start to copy tensors of bytes to offsets in a piece. Uses the list up."""
        return self._start(spot, parts, is_push=True)

    def pull(self, spot: Spot, parts: Parts) -> Ticket:
        """Start to fill tensors of bytes from offsets in a piece. Uses the list up."""
        return self._start(spot, parts, is_push=False)

    def wait(self, ticket: Ticket) -> None:
        """Let what the caller computes next come after the copies. Raises StateMemoryError."""
        if isinstance(ticket, torch.Event):
            stream = torch.accelerator.current_stream(self._device)
            before = stream.record_event(torch.Event(self._device, enable_timing=True))
            stream.wait_event(ticket)
            after = stream.record_event(torch.Event(self._device, enable_timing=True))
            self._transfers.span(before, after, {KIND: 0}, WAITED)
            return
        with self._transfers.timed({KIND: 0}, WAITED):
            ticket.result()

    def _start(self, spot: Spot, parts: Parts, *, is_push: bool) -> Ticket:
        if self._stream is None:
            call = self._room.write if is_push else self._room.read
            return self._pool.submit(self._on_thread, call, spot, parts)
        before = torch.accelerator.current_stream(self._device).record_event()
        if spot.host is None:
            return self._pool.submit(self._by_staging, spot, parts, before, is_push)
        return self._by_stream(spot.host, parts, before, is_push=is_push)

    @torch.no_grad()
    def _by_stream(
        self, host: Tensor, parts: Parts, before: torch.Event, *, is_push: bool
    ) -> torch.Event:
        assert self._stream is not None
        self._stream.wait_event(before)
        nbytes = sum(tensor.nbytes for tensor, _ in parts)
        begun = self._stream.record_event(torch.Event(self._device, enable_timing=True))
        with self._stream:
            while parts:
                tensor, offset = parts.pop()
                place = host[offset : offset + tensor.nbytes]
                source, into = (tensor, place) if is_push else (place, tensor)
                into.copy_(source, non_blocking=True)
        done = torch.Event(self._device, enable_timing=True, blocking=True)
        self._stream.record_event(done)
        self._transfers.span(begun, done, {KIND: nbytes}, LOADS)  # one lane in turn
        return done

    def _by_staging(self, spot: Spot, parts: Parts, before: torch.Event, is_push: bool) -> None:
        """On the thread: by way of locked memory."""
        assert self._staging is not None
        held = self._staging.take(spot.nbytes)
        assert held.host is not None
        whole = held.host[: spot.nbytes]
        if not is_push:
            self._room.read(spot, 0, whole)
        self._by_stream(whole, parts, before, is_push=is_push).synchronize()
        if is_push:
            self._room.write(spot, 0, whole)
        self._staging.give(held)

    def _on_thread(
        self, call: Callable[[Spot, int, Tensor], None], spot: Spot, parts: Parts
    ) -> None:
        """Each part is let go of as soon as it is copied: nothing outlives the call here."""
        nbytes = sum(tensor.nbytes for tensor, _ in parts)
        with torch.no_grad(), self._transfers.timed({KIND: nbytes}, LOADS):
            while parts:
                tensor, offset = parts.pop()
                call(spot, offset, tensor)
                del tensor
