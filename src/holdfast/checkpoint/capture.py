"""Capture: the only thing that training waits for when state is saved.

The layout (which sub-box of which tensor goes to which byte) is worked out once. A capture then is
one `torch._foreach_copy_` per dtype and device into views over the mapped arena, and the slot's
header last: the cost of one memcpy of the bytes that this rank owns. Hashing, writing and
committing are the mover's.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.checkpoint.arena import Arena, SlotHeader, digest, slot_capacity
from holdfast.checkpoint.blob import header, total_size
from holdfast.checkpoint.mover_client import MoverClient, MoverGoneError
from holdfast.errors import CheckpointError, FencedError, HoldfastError
from holdfast.layout import Topology
from holdfast.spec.boxes import Box
from holdfast.spec.manifest import Placed, placed
from holdfast.spec.ownership import owned_boxes
from holdfast.spec.state import StateTable, local_boxes

TORCH_DTYPE = {
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Captured:
    """The copy is made; training was blocked for `seconds`."""

    step: int
    seconds: float
    bytes: int


@dataclass(frozen=True, slots=True)
class Skipped:
    """No copy was made, or it will not be saved; training goes on."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class _Group:
    """Tensors of one dtype and device: sources, and their places in each slot."""

    sources: list[torch.Tensor]
    targets: list[list[torch.Tensor]]  # by slot


class Capturer:
    """Copies one rank's share of the state into its arena.

    `tensors` maps every name of the table to what this rank holds of it: a plain tensor, or a
    DTensor whose local part is meant. Their storage must stay the same; the contents may change
    between captures. `capture` belongs to the training thread; `announce`, `drop` and `settle`
    may be called by another one.
    """

    def __init__(
        self,
        mover: MoverClient,
        topology: Topology,
        table: StateTable,
        rank: int,
        tensors: Mapping[str, torch.Tensor],
        *,
        run: str,
        slots: int = 2,
    ) -> None:
        """Ask the mover for an arena and lay the views out.

        Raises CheckpointError when a tensor does not have the shape or dtype that the table and
        the topology give it on this rank.
        """
        self.skipped = 0
        self._mover = mover
        self._rank = rank
        self._run = digest(run)
        boxes = owned_boxes(topology, table, rank)
        self._placed = placed(boxes, table)
        self._local = {b.name: b for b in local_boxes(topology, table, rank)}
        self._head = header(self._placed)
        self._layout = digest(self._head)
        self._length = total_size(self._head, self._placed)
        fd = mover.arena(rank, slot_capacity(self._length), slots)
        try:
            self._arena = Arena(fd)
        finally:
            os.close(fd)
        for slot in range(slots):
            self._arena.data(slot, len(self._head))[:] = self._head
        self._groups = self._lay_out(tensors, slots)
        self._devices = _accelerators(self._groups)
        _pin(self._arena, self._devices)
        self._lock = threading.Lock()
        self._held: dict[int, tuple[int, SlotHeader]] = {}  # step -> what waits for announce

    @property
    def bytes(self) -> int:
        """Bytes that one capture copies."""
        return self._length - len(self._head)

    def ready(self) -> bool:
        """Whether a capture made now would find a free slot."""
        return self._arena.free_slot() is not None

    def capture(self, step: int, wait: float = 0.0) -> Captured | Skipped:
        """Copy the state after `step` into a free slot.

        While every slot is still being saved there is none; the capture is then skipped, after
        at most `wait` seconds of waiting. What is being read is never overwritten.
        """
        start = time.perf_counter()
        slot = self._arena.free_slot()
        if slot is None and wait > 0:
            slot = self._wait(wait)
        if slot is None:
            self.skipped += 1
            return Skipped(step, "every slot of the arena is still being saved")
        self._arena.begin(slot)
        with torch.no_grad():
            for group in self._groups:
                torch._foreach_copy_(group.targets[slot], group.sources, non_blocking=True)
        for device in self._devices:
            torch.accelerator.synchronize(device)
        made = self._arena.finish(
            slot, self._run, self._mover.generation, step, self._length, self._layout
        )
        with self._lock:
            self._held[step] = (slot, made)
        return Captured(step, time.perf_counter() - start, self.bytes)

    def announce(self, step: int, meta: Mapping[str, Any]) -> Skipped | None:
        """Have the mover save what was captured; None when it has taken it over.

        A mover that is gone or refuses is no reason to stop training; the slot is free again
        then. One that does not answer is asked once more, with a new proof: while a machine
        sleeps, proofs expire. Raises FencedError when a newer generation has begun.
        """
        with self._lock:
            held = self._held.pop(step, None)
        if held is None:
            return Skipped(step, "nothing was captured at this step")
        slot, made = held
        try:
            try:
                self._mover.captured(self._rank, step, slot, made.sequence, meta)
            except MoverGoneError:
                self._mover.captured(self._rank, step, slot, made.sequence, meta)
        except FencedError:
            raise
        except HoldfastError as error:
            # Should it be saved all the same, the next capture shows in its header, and the save
            # fails: better than a slot that nobody gives back.
            self._arena.release(slot)
            return Skipped(step, str(error))
        return None

    def drop(self, step: int) -> None:
        """Give up a capture that is not to be announced."""
        with self._lock:
            held = self._held.pop(step, None)
        if held is not None:
            self._arena.release(held[0])

    def settle(
        self, step: int, timeout: float, alive: Callable[[], None] = lambda: None
    ) -> str | None:
        """Wait until the checkpoint of `step` is committed; None then, else why it is not. `alive`
        is called every few seconds meanwhile."""
        try:
            return self._mover.settle(step, timeout, alive)
        except MoverGoneError as error:
            return str(error)

    def _wait(self, seconds: float) -> int | None:
        try:
            self._mover.wait_free(self._rank, seconds)
        except MoverGoneError:
            return None
        return self._arena.free_slot()

    # --- layout -----------------------------------------------------------------------------
    def _lay_out(self, tensors: Mapping[str, torch.Tensor], slots: int) -> list[_Group]:
        groups: dict[tuple[torch.dtype, torch.device], _Group] = {}
        for p in self._placed:
            source = self._source(p, tensors)
            key = (source.dtype, source.device)
            group = groups.setdefault(key, _Group([], [[] for _ in range(slots)]))
            group.sources.append(source)
            for slot in range(slots):
                group.targets[slot].append(self._target(p, slot))
        return list(groups.values())

    def _source(self, p: Placed, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The owned part of what this rank holds: a view."""
        if p.box.name not in tensors:
            raise CheckpointError(f"the state has no tensor {p.box.name}")
        local = local_part(tensors[p.box.name])
        held = self._local[p.box.name]
        if tuple(local.shape) != held.lengths or local.dtype != TORCH_DTYPE[p.dtype]:
            raise CheckpointError(
                f"{p.box.name} is {local.dtype} {tuple(local.shape)} on rank {self._rank}, "
                f"{p.dtype} {held.lengths} is due"
            )
        return view_of(local, held, p.box)

    def _target(self, p: Placed, slot: int) -> torch.Tensor:
        """The same part in a slot, as a tensor over the mapped memory."""
        flat = torch.frombuffer(
            self._arena.memory,
            dtype=TORCH_DTYPE[p.dtype],
            count=p.box.size,
            offset=self._arena.data_offset(slot) + len(self._head) + p.start,
        )
        return flat.view(p.box.lengths)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds: the local part of a DTensor, a plain tensor as it is."""
    to_local = getattr(tensor, "to_local", None)
    found = tensor if to_local is None else to_local()
    assert isinstance(found, torch.Tensor)
    return found.detach()


def view_of(local: torch.Tensor, held: Box, part: Box) -> torch.Tensor:
    """The view of `part` in a tensor that holds the box `held`."""
    for dim, (start, length) in enumerate(zip(part.offsets, part.lengths, strict=True)):
        local = local.narrow(dim, start - held.offsets[dim], length)
    return local


def _accelerators(groups: list[_Group]) -> list[torch.device]:
    found = {tensor.device for group in groups for tensor in group.sources}
    return sorted((device for device in found if device.type != "cpu"), key=str)


def _pin(arena: Arena, devices: list[torch.device]) -> None:
    """Lock the arena's pages for direct copies from a CUDA or ROCm device.

    Without it every copy goes through a bounce buffer at a fraction of the link's speed; a
    refusal costs speed only, so it is not an error.
    """
    if any(device.type == "cuda" for device in devices):
        memory = torch.frombuffer(arena.memory, dtype=torch.uint8)
        runtime: Any = torch.cuda  # cudart has no annotations
        code = runtime.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
        if int(code) != 0:
            # The runtime remembers the refusal, and torch's next launch would raise it.
            with suppress(RuntimeError):
                torch.zeros(1, device=devices[0])
