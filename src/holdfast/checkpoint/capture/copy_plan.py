"""How one rank's share of the state is copied into a slot of its arena: worked out once, then used
by every capture. `capturer.py` says when a copy runs, `chunked_copy.py` moves the bytes in pieces.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from holdfast.checkpoint.capture.chunked_copy import CopySpan, Piece, copy_spans, cut_into_pieces
from holdfast.checkpoint.memory.arena import Arena
from holdfast.core.devices import device_kind
from holdfast.core.format.manifest import PlacedBox
from holdfast.core.sharding.boxes import Box
from holdfast.errors import CheckpointError

logger = logging.getLogger(__name__)

TORCH_DTYPE = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class _ForeachGroup:
    """Tensors that one call to torch copies: on an accelerator, or not contiguous."""

    device: torch.device
    sources: list[torch.Tensor]
    targets: list[list[torch.Tensor]]  # by slot


class CopyPlan:
    """Which bytes of which tensor go to which byte of a slot, and the pieces of work that move
    them. On an accelerator, it has the streams on which they move."""

    def __init__(
        self,
        arena: Arena,
        placed: Sequence[PlacedBox],
        header_bytes: int,
        rank: int,
        held: Mapping[str, Box],
        tensors: Mapping[str, torch.Tensor],
    ) -> None:
        """Lay the views of `tensors` out for every slot of the arena. placed: what this rank owns,
        and where it goes behind the blob's header. held: the part of each tensor that this rank
        holds.

        Raises CheckpointError when a tensor does not have the shape or dtype that `held` and
        `placed` give it.
        """
        self._arena, self._placed, self._header_bytes = arena, placed, header_bytes
        self._rank, self._held = rank, held
        self._memory = torch.frombuffer(arena.memory, dtype=torch.uint8)
        self.spans, self._strided = self._lay_out(tensors, arena.slots)
        devices = sorted({g.device for g in self._strided if g.device.type != "cpu"}, key=str)
        self._has_pinned_pages = _pin_pages(self._memory, devices)
        self._streams = {device: torch.Stream(device) for device in devices}

    def close(self) -> None:
        """Refer to nothing of the state any more, and unlock the arena's pages: another arena may
        be mapped at the same address later."""
        self.spans, self._strided = [], []
        if self._has_pinned_pages:
            self._has_pinned_pages = False
            _cuda_runtime().cudaHostUnregister(self._memory.data_ptr())

    def _lay_out(
        self, tensors: Mapping[str, torch.Tensor], slots: int
    ) -> tuple[list[list[CopySpan]], list[_ForeachGroup]]:
        """Return contiguous tensors in pieces, the rest by dtype and device."""
        spans: list[CopySpan] = []
        groups: dict[tuple[torch.dtype, torch.device], _ForeachGroup] = {}
        for p in self._placed:
            source = self._owned_view(p, tensors)
            if source.device.type == "cpu" and source.is_contiguous():
                spans.append(CopySpan(source, 0, self._header_bytes + p.start, p.nbytes))
                continue
            key = (source.dtype, source.device)
            group = groups.setdefault(
                key, _ForeachGroup(source.device, [], [[] for _ in range(slots)])
            )
            group.sources.append(source)
            for slot in range(slots):
                group.targets[slot].append(self._slot_view(p, slot))
        return list(cut_into_pieces(spans)), list(groups.values())

    def inline_pieces(self, slot: int) -> list[Piece]:
        """Return pieces that copy everything into a slot, for one thread that waits for it."""
        pieces: list[Piece] = [partial(_copy, group, slot) for group in self._strided]
        pieces += [partial(torch.accelerator.synchronize, device) for device in self._streams]
        return [*pieces, *self._memmove_pieces(slot)]

    def background_pieces(self, slot: int) -> list[Piece]:
        """Return the same for a background thread. Accelerators get their part now, on a stream
        that waits for the work given to the device so far."""
        pieces: list[Piece] = []
        for device, stream in self._streams.items():
            stream.wait_stream(torch.accelerator.current_stream(device))
            with stream:
                for group in self._strided:
                    if group.device == device:
                        _copy(group, slot)
            ended = torch.Event(device, blocking=True)  # the thread sleeps, it does not spin
            stream.record_event(ended)
            pieces.append(ended.synchronize)
        pieces += [partial(_copy, g, slot) for g in self._strided if g.device.type == "cpu"]
        return [*pieces, *self._memmove_pieces(slot)]

    def _memmove_pieces(self, slot: int) -> Iterator[Piece]:
        base = self._memory.data_ptr() + self._arena.data_offset(slot)
        return (partial(copy_spans, base, piece) for piece in self.spans)

    def _owned_view(self, p: PlacedBox, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The owned part of what this rank holds: a view."""
        if p.box.name not in tensors:
            raise CheckpointError(f"the state has no tensor {p.box.name}")
        local = local_part(tensors[p.box.name])
        held = self._held[p.box.name]
        if tuple(local.shape) != held.lengths or local.dtype != TORCH_DTYPE[p.dtype]:
            raise CheckpointError(
                f"{p.box.name} is {local.dtype} {tuple(local.shape)} on rank {self._rank}, "
                f"{p.dtype} {held.lengths} is due"
            )
        return view_of(local, held, p.box)

    def _slot_view(self, p: PlacedBox, slot: int) -> torch.Tensor:
        """The same part in a slot, as a tensor over the mapped memory."""
        flat = torch.frombuffer(
            self._arena.memory,
            dtype=TORCH_DTYPE[p.dtype],
            count=p.box.size,
            offset=self._arena.data_offset(slot) + self._header_bytes + p.start,
        )
        return flat.view(p.box.lengths)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds: the local part of a DTensor, or a plain tensor unchanged."""
    to_local = getattr(tensor, "to_local", None)
    found = tensor if to_local is None else to_local()
    assert isinstance(found, torch.Tensor)
    return found.detach()


def view_of(local: torch.Tensor, held: Box, part: Box) -> torch.Tensor:
    """The view of `part` in a tensor that holds the box `held`."""
    for dim, (start, length) in enumerate(zip(part.offsets, part.lengths, strict=True)):
        local = local.narrow(dim, start - held.offsets[dim], length)
    return local


def _copy(group: _ForeachGroup, slot: int) -> None:
    with torch.no_grad():
        torch._foreach_copy_(group.targets[slot], group.sources, non_blocking=True)


def _pin_pages(memory: torch.Tensor, devices: list[torch.device]) -> bool:
    """Lock the arena's pages for direct copies from a device that can; whether that was done.

    Without it every copy goes through a bounce buffer at a fraction of the link's speed. A refusal
    costs only speed, so it is not an error, and the worker's log says it.
    """
    if not any(device_kind(device.type).can_pin for device in devices):
        return False
    code = int(_cuda_runtime().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    if code == 0:
        return True
    logger.warning(
        "the device does not lock the arena's %d bytes (CUDA error %d): captures are slow",
        memory.numel(),
        code,
    )
    # The runtime remembers the refusal, and torch's next launch would raise it.
    with suppress(RuntimeError):
        torch.zeros(1, device=devices[0])
    return False


def _cuda_runtime() -> Any:
    module: Any = torch.cuda  # cudart has no annotations
    return module.cudart()
