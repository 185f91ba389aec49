"""Moves what a block keeps for its backward pass out of the device, and brings it back in time.

A block's forward pass runs under hooks of autograd, which see each tensor that it keeps. They are
noted once for each memory. When the next block begins, their copy to `train.memory.activations`
begins. When that block is over, the device lets go of them. In the backward pass of a block, what
the block before it keeps is on its way back. So a device holds what two blocks keep. The last block
does not move if its backward pass comes next.

Parameters, buffers, and what a block is given without a gradient (angles, masks) stay where they
are. With recomputation a block keeps its input, and that moves. The results that `selective` keeps
stay on the device. A copy changes no bit.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from holdfast.training.memory.activation_rooms import Copier, Room, Spot, Ticket, make_room
from holdfast.training.memory.places import StateMemory
from holdfast.training.memory.tensor_account import plain_tensors

_ALIGNMENT = 64  # bytes that a memory's place in a piece is a multiple of


def move_activations(
    blocks: Sequence[nn.Module], memory: StateMemory, *, is_compiled: bool, room: Room | None = None
) -> None:
    """Change the blocks in place, after recomputation and before they are sharded.

    is_compiled: compile each block, inside of the hooks. room: where they go; None: what the run
    file names.
    """
    mover = _Mover(memory, room or make_room(memory))
    for index, block in enumerate(blocks):
        forward = torch.compile(block.forward) if is_compiled else block.forward
        block.forward = _moving(mover, index, block, forward)


def _moving(
    mover: _Mover, index: int, block: nn.Module, forward: Callable[..., Any]
) -> Callable[..., Any]:
    whose = weakref.ref(block)

    @functools.wraps(forward)
    def wrapped(*given: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*given, **named)
        found = whose()
        assert found is not None
        staying = chain(found.parameters(), found.buffers())
        tensors = list(plain_tensors((given, named)))
        without = (tensor for tensor in tensors if not tensor.requires_grad)
        # What comes in from another stage is a leaf.
        is_first = index == 0 or any(t.is_leaf and t.requires_grad for t in tensors)
        pack = mover.begin(chain(staying, without), is_first=is_first)
        with torch.autograd.graph.saved_tensors_hooks(pack, mover.unpack):
            out = forward(*given, **named)
        mover.end()
        return out

    return wrapped


class _Memory:
    """One memory that a block keeps. device: its bytes there; None: they are away. offset: in the
    piece of the record's room."""

    def __init__(self, record: _Record, device: Tensor) -> None:
        self.record, self.nbytes = record, device.nbytes
        self.device: Tensor | None = device
        self.offset = 0


class _Kept(NamedTuple):
    """A tensor that autograd keeps: a view of a memory."""

    memory: _Memory
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    start: int

    def tensor(self) -> Tensor:
        """The tensor, once its memory is on the device."""
        flat = self.memory.device
        assert flat is not None
        found = torch.empty(0, dtype=self.dtype, device=flat.device)
        return found.set_(flat.untyped_storage(), self.start, self.size, self.stride)


class _Record:
    """What one pass through a block keeps. before: that of the block before it in this pass.

    The memories live as long as autograd keeps a view of them, so they are referred to weakly.
    """

    def __init__(self, room: Room, before: _Record | None) -> None:
        self.room, self.before = room, before
        self.memories: list[weakref.ref[_Memory]] = []
        self.spot: Spot | None = None
        self.ticket: Ticket | None = None  # of the copy that is under way
        self.is_wanted = False

    @property
    def alive(self) -> Iterator[_Memory]:
        return (found for each in self.memories if (found := each()) is not None)

    @property
    def is_away(self) -> bool:
        return self.spot is not None

    def __del__(self) -> None:
        if self.spot is not None:
            self.room.give(self.spot)


def _is_parameter(tensor: Tensor) -> bool:
    """Return True for a parameter, or a part of one. Experts that other ranks share are gathered
    while their block runs, so they were not among its parameters when it began."""
    whole = tensor if tensor._base is None else tensor._base
    return whole.is_leaf and whole.requires_grad


class _Mover:
    """The records of all blocks of a rank."""

    def __init__(self, memory: StateMemory, room: Room) -> None:
        self._device, self._room = memory.device, room
        self._copier: Copier | None = None
        self._memory = memory
        self._open: _Record | None = None  # of the block that runs
        self._newest: _Record | None = None  # of the block that ran last; on the device
        self._leaving: _Record | None = None  # being copied

    # --- forward --------------------------------------------------------------------------
    def begin(self, staying: Iterator[Tensor], *, is_first: bool) -> Callable[[Tensor], object]:
        """A block begins. Return the hook for what it keeps. staying: tensors that do not move.
        is_first: no block of this pass came before."""
        self._let_go()
        newest, self._newest = self._newest, None
        if newest is not None:
            self._send(newest)
        record = self._open = _Record(self._room, None if is_first else newest)
        fixed = {tensor.untyped_storage()._cdata for tensor in plain_tensors(list(staying))}
        known: dict[tuple[int, int], weakref.ref[_Memory]] = {}
        return functools.partial(self._pack, record, fixed, known)

    def end(self) -> None:
        """The block is over: the one before it leaves the device."""
        self._let_go()
        self._newest, self._open = self._open, None

    def _pack(
        self,
        record: _Record,
        fixed: set[int],
        known: dict[tuple[int, int], weakref.ref[_Memory]],
        tensor: Tensor,
    ) -> object:
        if type(tensor) is not Tensor or tensor.device != self._device:
            return tensor
        storage = tensor.untyped_storage()
        if _is_parameter(tensor) or storage._cdata in fixed:
            return tensor
        key = storage._cdata, tensor._version
        memory = found() if (found := known.get(key)) is not None else None
        if memory is None:
            with torch.no_grad():
                flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            memory = _Memory(record, flat)
            known[key] = weakref.ref(memory)
            record.memories.append(known[key])
        start = int(tensor.storage_offset())
        return _Kept(memory, tensor.dtype, tensor.shape, tensor.stride(), start)

    def _send(self, record: _Record) -> None:
        """Start to copy what is left of a record."""
        memories, size = list(record.alive), 0
        for memory in memories:
            memory.offset = size
            size += -(-memory.nbytes // _ALIGNMENT) * _ALIGNMENT
        if not size:
            return
        record.spot = self._room.take(size)
        parts = [(m.device, m.offset) for m in memories if m.device is not None]
        record.ticket = self._copies.push(record.spot, parts)
        self._leaving = record

    def _let_go(self) -> None:
        """Let the device use the memory of what was copied."""
        record, self._leaving = self._leaving, None
        if record is None or record.ticket is None or record.is_wanted:
            return
        ticket, record.ticket = record.ticket, None
        self._copies.wait(ticket)
        for memory in record.alive:
            memory.device = None

    # --- backward -------------------------------------------------------------------------
    @torch.no_grad()
    def unpack(self, kept: object) -> Tensor:
        """Return what was kept. The first of a block also asks for the block before it."""
        if not isinstance(kept, _Kept):
            assert isinstance(kept, Tensor)
            return kept
        record = kept.memory.record
        if not record.is_wanted:
            record.is_wanted = True
            self._fetch(record)
            ticket, record.ticket = record.ticket, None
            if ticket is not None:
                self._copies.wait(ticket)
            before, record.before = record.before, None
            if before is not None:
                self._fetch(before)
        return kept.tensor()

    def _fetch(self, record: _Record) -> None:
        """Start to bring back what is away of a record."""
        if record.spot is None or self._leaving is record:
            return
        parts = []
        for memory in record.alive:
            memory.device = torch.empty(memory.nbytes, dtype=torch.uint8, device=self._device)
            parts.append((memory.device, memory.offset))
        spot, record.spot = record.spot, None
        if parts:
            record.ticket = self._copies.pull(spot, parts)
        self._room.give(spot)  # later copies to it come after this one

    @property
    def _copies(self) -> Copier:
        """Made when it is needed: a thread does not survive a fork."""
        if self._copier is None:
            self._copier = Copier(self._memory, self._room)
        return self._copier
