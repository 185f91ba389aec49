"""How one rank's share of the state is copied into a slot of its arena: worked out once, then used
by every capture. `capturer.py` says when a copy runs, `chunked_copy.py` moves the bytes in pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise

import torch

from holdfast.checkpoint.capture.chunked_copy import CopySpan, Piece, copy_spans, cut_into_pieces
from holdfast.checkpoint.capture.pinned_memory import CHUNK_BYTES, PinnedMemory, find_pinning
from holdfast.checkpoint.memory.arena import Arena
from holdfast.core.devices import device_kind
from holdfast.core.format.manifest import PlacedBox
from holdfast.core.sharding.boxes import Box, element_range
from holdfast.core.sharding.state_table import ITEM_BYTES
from holdfast.errors import CheckpointError

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
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """Lay the views of `tensors` out for every slot of the arena. placed: what this rank owns,
        and where it goes behind the blob's header. held: the part of each tensor that this rank
        holds. chunk_bytes: most bytes of the arena that are locked in one call.

        Raises CheckpointError when a tensor does not have the shape or dtype that `held` and
        `placed` give it.
        """
        self._arena, self._placed, self._header_bytes = arena, placed, header_bytes
        self._rank, self._held = rank, held
        self._memory = torch.frombuffer(arena.memory, dtype=torch.uint8)
        for p in placed:
            self._owned_view(p, tensors)
        devices = sorted({local_part(tensors[p.box.name]).device for p in placed}, key=str)
        self._streams = {
            d: torch.Stream(d, priority=device_kind(d.type).lowest_stream_priority)
            for d in devices
            if d.type != "cpu"
        }
        self._pinned = PinnedMemory(
            find_pinning(devices), self._memory.data_ptr(), self._memory.numel(), chunk_bytes
        )
        self.spans, self._strided = self._lay_out(tensors, arena.slots)

    def close(self) -> None:
        """Refer to nothing of the state any more, and unlock the arena's pages."""
        self.spans, self._strided = [], []
        self._pinned.close()

    def _lay_out(
        self, tensors: Mapping[str, torch.Tensor], slots: int
    ) -> tuple[list[list[CopySpan]], list[_ForeachGroup]]:
        """Return contiguous tensors in pieces, the rest by dtype and device."""
        spans: list[CopySpan] = []
        groups: dict[tuple[torch.dtype, torch.device], _ForeachGroup] = {}
        cuts = self._cuts(slots)
        for p in chain.from_iterable(_cut(placed, cuts) for placed in self._placed):
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
                # The same part in a slot, as a tensor over the mapped memory.
                flat = torch.frombuffer(
                    self._arena.memory,
                    dtype=TORCH_DTYPE[p.dtype],
                    count=p.box.size,
                    offset=self._arena.data_offset(slot) + self._header_bytes + p.start,
                )
                group.targets[slot].append(flat.view(p.box.lengths))
        return list(cut_into_pieces(spans)), list(groups.values())

    def _cuts(self, slots: int) -> list[int]:
        """Return the places behind the blob's header that no copy may cross, in any slot. All
        slots are cut alike, so that their sources are the same."""
        begins = [self._arena.data_offset(slot) + self._header_bytes for slot in range(slots)]
        cuts = {edge - begin for edge in self._pinned.edges for begin in begins}
        return sorted(cut for cut in cuts if cut > 0)

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
            pieces.append(partial(_wait_for, ended, device))
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


def _cut(placed: PlacedBox, cuts: Iterable[int]) -> Iterator[PlacedBox]:
    """Yield the parts of a box that lie between the cuts. Cuts and blobs begin at a page, so a
    cut never hits an element."""
    size, start, stop = ITEM_BYTES[placed.dtype], placed.start, placed.start + placed.nbytes
    inside = [cut for cut in cuts if start < cut < stop]
    if not inside:
        yield placed
        return
    for low, high in pairwise((start, *inside, stop)):
        for box in element_range(placed.box, (low - start) // size, (high - start) // size):
            yield PlacedBox(box, placed.dtype, low)
            low += box.size * size


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


def _wait_for(event: torch.Event, device: torch.device) -> None:
    """Wait for a device on a thread of ours, which would use the first device otherwise."""
    with torch.accelerator.device_index(device.index):
        event.synchronize()


def _copy(group: _ForeachGroup, slot: int) -> None:
    with torch.no_grad():
        torch._foreach_copy_(group.targets[slot], group.sources, non_blocking=True)
