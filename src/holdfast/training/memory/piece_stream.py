"""Brings pieces of a rank's state to the device, one after another, and takes them back.

While piece i is updated, one thread reads piece i + 1 and another one writes piece i - 1 back. So
both directions of a link are used at once. There are three sets of buffers. A read begins when the
write of the piece three before it is done. On an accelerator one stream copies to the device and
another one from it. If the state lies in locked memory, they copy from there and to there. State in
files goes through buffers in locked memory.

With `train.memory.update: host` the update runs on the host. Then what lies on the device comes to
buffers of the host, and what lies there is updated where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from holdfast.core.sharding.update_pieces import (
    BUFFER_SETS,
    PiecePart,
    UpdatePiece,
    staged_elements,
)
from holdfast.training.memory.places import StateMemory
from holdfast.training.memory.transfers import LOADS, STORES, WAITED


@dataclass(frozen=True)
class StagedTensors:
    """One tensor of each parameter (None: it is not updated). writes_back: an update changes it.
    Those that lie where the update runs are used where they are. kind: a word of the ledger."""

    tensors: Sequence[Tensor | None]
    writes_back: bool
    kind: str

    def part(self, part: PiecePart) -> Tensor:
        """-> [elements of the part]"""
        tensor = self.tensors[part.index]
        assert tensor is not None, part
        return tensor.view(-1)[part.start : part.stop]


Update = Callable[[UpdatePiece, list[list[Tensor]]], None]
"""From a piece and, for each of the roles, the tensors of its parts, where it runs."""


class PieceStream:
    """Runs an update over all pieces. roles: what it needs of each parameter."""

    def __init__(
        self, memory: StateMemory, pieces: Sequence[UpdatePiece], roles: Sequence[StagedTensors]
    ) -> None:
        self._memory, self._pieces, self._roles = memory, pieces, roles
        first = pieces[0].parts[0].index if pieces else 0
        self._is_staged = [
            (found := role.tensors[first]) is not None and memory.is_staged(found) for role in roles
        ]
        # The copies of each direction: of loads, and of stores.
        self._streams: tuple[torch.Stream, torch.Stream] | None = None
        if memory.device.type != "cpu":
            self._streams = torch.Stream(memory.device), torch.Stream(memory.device)

    @property
    def staged_bytes(self) -> int:
        """Bytes that all buffers take where the update runs."""
        elements = staged_elements(self._pieces)
        return sum(elements * _dtype_of(role).itemsize for role in self._staged_roles())

    def run(self, update: Update) -> None:
        """Update piece by piece. Raises StateMemoryError if a file fails; the state is void."""
        if not self._pieces:
            return
        place = self._memory.config.update
        with (
            self._memory.ledger.held(place, "staging", self.staged_bytes),
            ThreadPoolExecutor(1, "state-loads") as reads,
            ThreadPoolExecutor(1, "state-stores") as writes,
        ):
            sets = [self._new_buffers() for _ in range(min(BUFFER_SETS, len(self._pieces)))]
            if self._streams is not None and (allocated := self._event()) is not None:
                for stream in self._streams:
                    stream.wait_event(allocated)
            stores: list[Future[torch.Event | None]] = []
            load = partial(self._load, stores, sets)
            loads = [reads.submit(load, 0)]
            for number, piece in enumerate(self._pieces):
                if number + 1 < len(self._pieces):
                    loads.append(reads.submit(load, number + 1))
                buffers = sets[number % len(sets)]
                self._wait(number, loads[number])
                update(piece, self._tensors(piece, buffers))
                stores.append(writes.submit(self._store, number, buffers, self._event()))
            last = self._nbytes(len(self._pieces) - 1, stores=True)
            with self._memory.transfers.timed(last, WAITED):
                for stored in stores:
                    stored.result()
                if self._streams is not None:
                    self._streams[1].synchronize()

    def _wait(self, number: int, load: Future[torch.Event | None]) -> None:
        """Let the update of a piece come after its load."""
        transfers, nbytes = self._memory.transfers, self._nbytes(number)
        with transfers.timed(nbytes, WAITED):
            ready = load.result()
        if ready is not None:
            before = self._event()
            torch.accelerator.current_stream(self._memory.device).wait_event(ready)
            after = self._event()
            assert before is not None
            assert after is not None
            transfers.span(before, after, nbytes, WAITED)

    def _nbytes(self, number: int, *, stores: bool = False) -> dict[str, int]:
        """Bytes of a piece that are copied in one direction, by kind."""
        piece, found = self._pieces[number], dict[str, int]()
        elements = sum(part.stop - part.start for part in piece.parts)
        for role in self._staged_roles():
            if role.writes_back or not stores:
                nbytes = elements * _dtype_of(role).itemsize
                found[role.kind] = found.get(role.kind, 0) + nbytes
        return found

    # --- buffers ----------------------------------------------------------------------------
    def _staged_roles(self) -> Iterator[StagedTensors]:
        return (role for role, staged in zip(self._roles, self._is_staged, strict=True) if staged)

    def _new_buffers(self) -> list[_Buffer]:
        size, memory = max(piece.size for piece in self._pieces), self._memory
        first = self._pieces[0].parts[0]
        if memory.updates_on_host:
            is_locked = memory.device.type != "cpu"
            return [
                _Buffer(room, room)
                for role in self._staged_roles()
                for room in [torch.empty(size, dtype=_dtype_of(role), pin_memory=is_locked)]
            ]
        return [
            _Buffer.new(
                size, _dtype_of(role), memory.device, direct=memory.is_locked(role.part(first))
            )
            for role in self._staged_roles()
        ]

    def _tensors(self, piece: UpdatePiece, buffers: Sequence[_Buffer]) -> list[list[Tensor]]:
        """For each role, its parts of a piece where the update runs."""
        staged = iter(buffers)
        found: list[list[Tensor]] = []
        for role, is_staged in zip(self._roles, self._is_staged, strict=True):
            buffer = next(staged).device if is_staged else None
            found.append(
                [role.part(part) if buffer is None else _cut(buffer, part) for part in piece.parts]
            )
        return found

    # --- on the threads ---------------------------------------------------------------------
    @torch.no_grad()
    def _load(
        self,
        stores: Sequence[Future[torch.Event | None]],
        sets: Sequence[Sequence[_Buffer]],
        number: int,
    ) -> torch.Event | None:
        """Fill buffers with a piece, after the store of the piece that had them before. Return what
        the update has to wait for."""
        buffers, transfers = sets[number % len(sets)], self._memory.transfers
        stored = stores[number - len(sets)].result() if number >= len(sets) else None
        nbytes, (on_host, on_device) = self._nbytes(number), self._hops(buffers)
        with transfers.timed(nbytes if on_host else {}, LOADS), self._host_stream(0):
            for role, buffer in zip(self._staged_roles(), buffers, strict=True):
                for part in self._pieces[number].parts:
                    if buffer.host is not None:
                        self._memory.load(role.part(part), _cut(buffer.host, part))
        if self._streams is None or not on_device:
            return None
        stream = self._streams[0]
        if stored is not None:
            stream.wait_event(stored)
        begun = stream.record_event(self._new_event())
        with stream:
            for role, buffer in zip(self._staged_roles(), buffers, strict=True):
                if buffer.host is not None:
                    buffer.device.copy_(buffer.host, non_blocking=True)
                    continue
                for part in self._pieces[number].parts:
                    _cut(buffer.device, part).copy_(role.part(part), non_blocking=True)
        done = stream.record_event(self._new_event())
        transfers.span(begun, done, nbytes, LOADS)
        return done

    @torch.no_grad()
    def _store(
        self, number: int, buffers: Sequence[_Buffer], updated: torch.Event | None
    ) -> torch.Event | None:
        """Write what the update has changed back to its place. Return what a later load into the
        same buffers has to wait for."""
        changed = [
            (role, buffer)
            for role, buffer in zip(self._staged_roles(), buffers, strict=True)
            if role.writes_back
        ]
        nbytes, (on_host, on_device) = self._nbytes(number, stores=True), self._hops(buffers)
        done: torch.Event | None = None
        if on_device and updated is not None:
            done = self._copy_back(number, changed, updated)
        with self._memory.transfers.timed(nbytes if on_host else {}, STORES), self._host_stream(1):
            for role, buffer in changed:
                for part in self._pieces[number].parts:
                    if buffer.host is not None:
                        self._memory.store(role.part(part), _cut(buffer.host, part))
        return done

    def _copy_back(
        self, number: int, changed: Sequence[tuple[StagedTensors, _Buffer]], updated: torch.Event
    ) -> torch.Event:
        """Copy from the device. What goes through a buffer of the host has arrived on return."""
        assert self._streams is not None
        stream = self._streams[1]
        stream.wait_event(updated)
        begun = stream.record_event(self._new_event())
        with stream:
            for role, buffer in changed:
                if buffer.host is not None:
                    buffer.host.copy_(buffer.device, non_blocking=True)
                    continue
                for part in self._pieces[number].parts:
                    role.part(part).copy_(_cut(buffer.device, part), non_blocking=True)
        done = stream.record_event(self._new_event(blocking=True))
        self._memory.transfers.span(begun, done, self._nbytes(number, stores=True), STORES)
        if any(buffer.host is not None for _, buffer in changed):
            done.synchronize()
        return done

    def _hops(self, buffers: Sequence[_Buffer]) -> tuple[bool, bool]:
        """Whether the threads copy, and whether streams of a device do."""
        on_device = self._streams is not None and not self._memory.updates_on_host
        return any(buffer.host is not None for buffer in buffers), on_device

    def _host_stream(self, direction: int) -> AbstractContextManager[object]:
        """The stream of copies that an update on the host makes; the thread waits for them."""
        if self._streams is None or not self._memory.updates_on_host:
            return nullcontext()
        return self._streams[direction]

    def _new_event(self, *, blocking: bool = False) -> torch.Event:
        return torch.Event(self._memory.device, enable_timing=True, blocking=blocking)

    def _event(self) -> torch.Event | None:
        """The end of the update that was given to the device last."""
        if self._streams is None:
            return None
        device = self._memory.device
        return torch.accelerator.current_stream(device).record_event(self._new_event())


@dataclass(frozen=True)
class _Buffer:
    """Room for one role of one piece. On a CPU, and for an update there, both are the same tensor.
    host: None if the device copies from the state itself.  [elements]"""

    device: Tensor
    host: Tensor | None

    @staticmethod
    def new(elements: int, dtype: torch.dtype, device: torch.device, *, direct: bool) -> _Buffer:
        there = torch.empty(elements, dtype=dtype, device=device)
        if device.type == "cpu":
            return _Buffer(there, there)
        host = None if direct else torch.empty(elements, dtype=dtype, pin_memory=True)
        return _Buffer(there, host)


def _cut(buffer: Tensor, part: PiecePart) -> Tensor:
    return buffer[part.at : part.at + part.stop - part.start]


def _dtype_of(role: StagedTensors) -> torch.dtype:
    return next(tensor.dtype for tensor in role.tensors if tensor is not None)
