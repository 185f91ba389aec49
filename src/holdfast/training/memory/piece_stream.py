"""Brings pieces of a rank's state to the device, one after another, and takes them back.

While piece i is updated, a thread writes piece i - 1 back and then reads piece i + 1. So there are
three sets of buffers. On an accelerator one stream copies to the device and another one from it. If
the state lies in locked memory, they copy from there and to there. State in files goes through
buffers in locked memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.config.sections.memory import DEVICE
from holdfast.core.sharding.update_pieces import (
    BUFFER_SETS,
    PiecePart,
    UpdatePiece,
    staged_elements,
)
from holdfast.training.memory.places import StateMemory


@dataclass(frozen=True)
class StagedTensors:
    """One tensor of each parameter (None: it is not updated). writes_back: an update changes it.
    Those that lie on the device already are used where they are."""

    tensors: Sequence[Tensor | None]
    writes_back: bool

    def part(self, part: PiecePart) -> Tensor:
        """-> [elements of the part]"""
        tensor = self.tensors[part.index]
        assert tensor is not None, part
        return tensor.view(-1)[part.start : part.stop]


Update = Callable[[UpdatePiece, list[list[Tensor]]], None]
"""From a piece and, for each of the roles, the tensors of its parts, on the device."""


class PieceStream:
    """Runs an update over all pieces. roles: what it needs of each parameter."""

    def __init__(
        self, memory: StateMemory, pieces: Sequence[UpdatePiece], roles: Sequence[StagedTensors]
    ) -> None:
        self._memory, self._pieces, self._roles = memory, pieces, roles
        first = pieces[0].parts[0].index if pieces else 0
        self._is_staged = [
            (found := role.tensors[first]) is not None and not memory.is_on_device(found)
            for role in roles
        ]
        # The copies of each direction: to the device, and from it.
        self._streams: tuple[torch.Stream, torch.Stream] | None = None
        if memory.device.type != "cpu":
            self._streams = torch.Stream(memory.device), torch.Stream(memory.device)

    @property
    def staged_bytes(self) -> int:
        """Bytes of the device that all buffers take."""
        elements = staged_elements(self._pieces)
        return sum(elements * _dtype_of(role).itemsize for role in self._staged_roles())

    def run(self, update: Update) -> None:
        """Update piece by piece. Raises StateMemoryError if a file fails; the state is void."""
        if not self._pieces:
            return
        ledger = self._memory.ledger
        with (
            ledger.held(DEVICE, "staging", self.staged_bytes),
            ThreadPoolExecutor(1, "state-pieces") as pool,
        ):
            sets = [self._new_buffers() for _ in range(min(BUFFER_SETS, len(self._pieces)))]
            if self._streams is not None and (allocated := self._event()) is not None:
                self._streams[0].wait_event(allocated)
            loads = [pool.submit(self._load, 0, sets[0])]
            stores: list[Future[None]] = []
            for number, piece in enumerate(self._pieces):
                if number + 1 < len(self._pieces):
                    following = sets[(number + 1) % len(sets)]
                    loads.append(pool.submit(self._load, number + 1, following))
                ready, buffers = loads[number].result(), sets[number % len(sets)]
                if ready is not None:
                    torch.accelerator.current_stream(self._memory.device).wait_event(ready)
                update(piece, self._tensors(piece, buffers))
                stores.append(pool.submit(self._store, number, buffers, self._event()))
            for stored in stores:
                stored.result()
            if self._streams is not None:
                self._streams[1].synchronize()

    # --- buffers ----------------------------------------------------------------------------
    def _staged_roles(self) -> Iterator[StagedTensors]:
        return (role for role, staged in zip(self._roles, self._is_staged, strict=True) if staged)

    def _new_buffers(self) -> list[_Buffer]:
        size = max(piece.size for piece in self._pieces)
        device = self._memory.device
        first = self._pieces[0].parts[0]
        return [
            _Buffer.new(
                size, _dtype_of(role), device, direct=self._memory.is_locked(role.part(first))
            )
            for role in self._staged_roles()
        ]

    def _tensors(self, piece: UpdatePiece, buffers: Sequence[_Buffer]) -> list[list[Tensor]]:
        """For each role, its parts of a piece on the device."""
        staged = iter(buffers)
        found: list[list[Tensor]] = []
        for role, is_staged in zip(self._roles, self._is_staged, strict=True):
            buffer = next(staged).device if is_staged else None
            found.append(
                [role.part(part) if buffer is None else _cut(buffer, part) for part in piece.parts]
            )
        return found

    # --- on the thread ----------------------------------------------------------------------
    @torch.no_grad()
    def _load(self, number: int, buffers: Sequence[_Buffer]) -> torch.Event | None:
        """Fill buffers with a piece. Return what the update has to wait for."""
        for role, buffer in zip(self._staged_roles(), buffers, strict=True):
            for part in self._pieces[number].parts:
                if buffer.host is not None:
                    self._memory.load(role.part(part), _cut(buffer.host, part))
        if self._streams is None:
            return None
        stream = self._streams[0]
        with stream:
            for role, buffer in zip(self._staged_roles(), buffers, strict=True):
                if buffer.host is not None:
                    buffer.device.copy_(buffer.host, non_blocking=True)
                    continue
                for part in self._pieces[number].parts:
                    _cut(buffer.device, part).copy_(role.part(part), non_blocking=True)
        return stream.record_event(torch.Event(self._memory.device))

    @torch.no_grad()
    def _store(self, number: int, buffers: Sequence[_Buffer], updated: torch.Event | None) -> None:
        """Write what the update has changed back to its place."""
        changed = [
            (role, buffer)
            for role, buffer in zip(self._staged_roles(), buffers, strict=True)
            if role.writes_back
        ]
        if self._streams is not None and updated is not None:
            self._copy_back(number, changed, updated)
        for role, buffer in changed:
            for part in self._pieces[number].parts:
                if buffer.host is not None:
                    self._memory.store(role.part(part), _cut(buffer.host, part))

    def _copy_back(
        self, number: int, changed: Sequence[tuple[StagedTensors, _Buffer]], updated: torch.Event
    ) -> None:
        """Copy from the device. What goes through a buffer of the host has arrived on return. A
        later load into the same buffers waits for all of it."""
        assert self._streams is not None
        stream = self._streams[1]
        stream.wait_event(updated)
        with stream:
            for role, buffer in changed:
                if buffer.host is not None:
                    buffer.host.copy_(buffer.device, non_blocking=True)
                    continue
                for part in self._pieces[number].parts:
                    role.part(part).copy_(_cut(buffer.device, part), non_blocking=True)
        done = stream.record_event(torch.Event(self._memory.device, blocking=True))
        self._streams[0].wait_event(done)
        if any(buffer.host is not None for _, buffer in changed):
            done.synchronize()

    def _event(self) -> torch.Event | None:
        """The end of the update that was given to the device last."""
        if self._streams is None:
            return None
        device = self._memory.device
        return torch.accelerator.current_stream(device).record_event(torch.Event(device))


@dataclass(frozen=True)
class _Buffer:
    """Room for one role of one piece. On a CPU both are the same tensor. host: None if the device
    copies from the state itself.  [elements]"""

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
