"""Capture: how one rank's share of the state comes into its arena.

The layout (which sub-box of which tensor goes to which byte) is worked out once. What moves the
bytes stands in `checkpoint/capture/chunked_copy.py`; here is when:

    begin(N)   right after the update of step N: takes a slot, marks it dirty, and returns; a
               thread copies while the next forward and backward pass computes, because nothing
               changes parameters or moments before the next update
    fence()    before the vote of step N + 1: copies what is left, if anything, and returns when
               the slot's header is written. So whoever has voted holds the snapshot before whole,
               and a snapshot is overwritten only when a newer one is whole on every rank.
    capture(N) both at once: training stands still for one memcpy of the bytes that this rank owns

A process that is killed meanwhile leaves this slot dirty and the other slots as they were. On an
accelerator, the copies run on a stream of their own, into locked pages. The stream first waits for
the update. The thread then only waits for that stream and writes the header. (Only a machine with
an accelerator tests the streams. On other machines the tests cover the thread.) Hashing, writing
and committing are the mover's.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from holdfast.checkpoint.capture.chunked_copy import (
    ChunkedCopy,
    CopyListener,
    CopySpan,
    CopyTiming,
    Piece,
    copy_spans,
    cut_into_pieces,
)
from holdfast.checkpoint.capture.chunked_copy import CompletedCapture as CompletedCapture
from holdfast.checkpoint.capture.chunked_copy import SkippedCapture as SkippedCapture
from holdfast.checkpoint.format.blob import blob_header, blob_size
from holdfast.checkpoint.memory.arena import Arena, SlotHeader, identity_digest, slot_capacity
from holdfast.checkpoint.mover.client import MoverClient, MoverGoneError
from holdfast.core.format.manifest import PlacedBox, place_boxes
from holdfast.core.sharding.boxes import Box
from holdfast.core.sharding.ownership import owned_boxes
from holdfast.core.sharding.state_table import StateTable, local_boxes
from holdfast.errors import CheckpointError, FencedError, HoldfastError
from holdfast.layout import Topology
from holdfast.policy.saving.destinations import SaveDestinations

FREE_SLOT_POLL_S = 2.0
"""Seconds of one question for a free slot: a mover that is stopped answers none."""

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


class Capturer:
    """Copies one rank's share of the state into its arena.

    `tensors` maps every name of the table to what this rank holds of it: a plain tensor, or a
    DTensor whose local part is meant. Their storage must stay the same; the contents may change
    between captures. `begin`, `fence` and `capture` belong to the training thread; `announce`,
    `drop_capture` and `wait_until_committed` may be called by another one.
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
        has_released_old_memory: bool = False,
    ) -> None:
        """Ask the mover for an arena and lay the views out.

        has_released_old_memory: every capturer that this process had in older generations is
        closed, so that their memory may be used again.
        Raises CheckpointError when a tensor does not have the shape or dtype that the table and
        the topology give it on this rank.
        """
        self.skipped = 0
        self._mover = mover
        self._rank = rank
        self._run = identity_digest(run)
        boxes = owned_boxes(topology, table, self._rank)
        self._placed = place_boxes(boxes, table)
        self._local = {b.name: b for b in local_boxes(topology, table, rank)}
        self._header = blob_header(self._placed)
        self._layout = identity_digest(self._header)
        self._length = blob_size(self._header, self._placed)
        fd = mover.get_arena(
            self._rank, slot_capacity(self._length), slots, has_released_old_memory
        )
        try:
            self._arena = Arena(fd)
            self._inode = os.fstat(fd).st_ino
        finally:
            os.close(fd)
        self._memory = torch.frombuffer(self._arena.memory, dtype=torch.uint8)
        self._spans, self._strided = self._lay_out(tensors, slots)
        devices = sorted({g.device for g in self._strided if g.device.type != "cpu"}, key=str)
        _pin_pages(self._arena, devices)
        self._streams = {device: torch.Stream(device) for device in devices}
        self._copy_threads = ThreadPoolExecutor(1, "capture")
        self._copy: ChunkedCopy | None = None  # the newest; not more than one is under way
        self._copied_step = 0  # its step
        self._slots_with_header: set[int] = set()  # slots that hold the blob's header
        self._lock = threading.Lock()
        self._unannounced: dict[int, tuple[int, SlotHeader]] = {}  # step -> what waits for announce
        self._failed: dict[int, str] = {}  # step -> why its copy is incomplete

    @property
    def nbytes(self) -> int:
        """Bytes that one capture copies."""
        return self._length - len(self._header)

    def has_free_slot(self) -> bool:
        """Return True if a capture begun now would find a free slot. That stays true until one is
        begun."""
        return self._arena.free_slot() is not None

    def is_connected(self) -> bool:
        """Return True if the mover still has the arena. A new mover makes another one. Raises as
        `MoverClient.get_arena` does. Any thread may call it."""
        fd = self._mover.get_arena(self._rank, self._arena.capacity, self._arena.slots)
        try:
            return os.fstat(fd).st_ino == self._inode
        finally:
            os.close(fd)

    def report_orphaned_saves(self, steps: Sequence[int]) -> None:
        """Tell the mover of durable saves that the one before it had taken over."""
        self._mover.report_orphaned_saves(self._rank, steps)

    # --- copying ----------------------------------------------------------------------------
    def begin(self, step: int, wait: float = 0.0) -> ChunkedCopy | SkippedCapture:
        """Begin to copy the state after `step` into a free slot; it must not change until
        `fence` has returned.

        While every slot is still being saved there is none; the capture is then skipped, after
        at most `wait` seconds of waiting. What is being read is never overwritten.
        """
        start = time.perf_counter()
        slot = self._acquire_slot(wait)
        if slot is None:
            return self._skip_no_slot(step)
        self._copy = copy = ChunkedCopy(
            self._background_pieces(slot), partial(self._write_slot_header, step, slot)
        )
        self._track_copy(step, copy)
        self._copy_threads.submit(copy.copy_pieces)
        copy.blocked_s = time.perf_counter() - start
        return copy

    def fence(self) -> float:
        """Return when no copy is under way: the state may change then. Seconds that it took."""
        return 0.0 if self._copy is None else self._copy.fence()

    def capture(self, step: int, wait: float = 0.0) -> CompletedCapture | SkippedCapture:
        """Capture as `begin` and `fence` do, on this thread alone."""
        start = time.perf_counter()
        slot = self._acquire_slot(wait)
        if slot is None:
            return self._skip_no_slot(step)
        self._copy = copy = ChunkedCopy(
            self._inline_pieces(slot), partial(self._write_slot_header, step, slot)
        )
        self._track_copy(step, copy)
        copy.blocked_s = time.perf_counter() - start
        copy.fence()
        if (failed := self._failed.get(step)) is not None:
            return SkippedCapture(step, failed)
        return CompletedCapture(step, time.perf_counter() - start, self.nbytes)

    def call_when_copied(self, step: int, listener: CopyListener) -> None:
        """Call when the copy of `step`, the newest, has ended: on the thread that ends it, or at
        once if it has."""
        if self._copy is None or self._copied_step != step:
            raise RuntimeError(f"step {step} is not the newest that was captured")
        self._copy.call_when_done(listener)

    def close(self) -> None:
        """Finish what is under way; nothing of the state is referred to afterwards."""
        self.fence()
        self._copy_threads.shutdown()
        self._copy = None
        self._spans, self._strided = [], []

    def _acquire_slot(self, wait: float) -> int | None:
        """A slot, marked dirty and with the blob's header in it."""
        self.fence()
        slot = self._arena.free_slot()
        if slot is None and wait > 0:
            slot = self._wait_for_slot(wait)
        if slot is not None:
            self._arena.begin_write(slot)
            if slot not in self._slots_with_header:
                self._arena.data(slot, len(self._header))[:] = self._header
                self._slots_with_header.add(slot)
        return slot

    def _skip_no_slot(self, step: int) -> SkippedCapture:
        self.skipped += 1
        return SkippedCapture(step, "every slot of the arena is still being saved")

    def _write_slot_header(self, step: int, slot: int) -> None:
        made = self._arena.finish_write(
            slot, self._run, self._mover.generation, step, self._length, self._layout
        )
        with self._lock:
            self._unannounced[step] = (slot, made)

    def _track_copy(self, step: int, copy: ChunkedCopy) -> None:
        """A copy that fails leaves its slot dirty and free, and says so when it is announced."""
        self._copied_step = step

        def ended(cost: CopyTiming) -> None:
            if cost.error is not None:
                with self._lock:
                    self._failed[step] = f"the copy failed: {cost.error}"

        copy.call_when_done(ended)

    # --- handing over -----------------------------------------------------------------------
    def announce(
        self,
        step: int,
        meta: Mapping[str, Any],
        is_durable: bool = True,
        to_peers: bool | None = None,
        to_bucket: bool = True,
    ) -> SkippedCapture | None:
        """Have the mover save what was captured, or with `is_durable` False keep it in memory; None
        when it has taken it over. to_peers, to_bucket: as in
        `policy.saving.destinations.SaveDestinations`.

        If the mover has exited or refuses, training continues and the slot is free again. If it
        does not answer, it is asked once more, with a new proof, because proofs expire while a
        machine sleeps. Raises FencedError when a newer generation has begun.
        """
        with self._lock:
            held = self._unannounced.pop(step, None)
            failed = self._failed.pop(step, "nothing was captured at this step")
        if held is None:
            return self._report_skip(step, failed)
        slot, made = held
        try:
            self._hand_over(
                step, slot, made, meta, SaveDestinations(is_durable, to_peers, to_bucket)
            )
        except FencedError:
            raise
        except HoldfastError as error:
            # If the mover saves it anyway, the next capture shows in the slot's header, and the
            # save fails. That is better than a slot that is never released.
            self._arena.release(slot)
            return self._report_skip(step, str(error))
        return None

    def _report_skip(self, step: int, reason: str) -> SkippedCapture:
        """Report a skipped step, because slots of other ranks must not wait for this rank's
        part."""
        with suppress(HoldfastError):
            self._mover.announce_skip(self._rank, step, reason)
        return SkippedCapture(step, reason)

    def _hand_over(
        self,
        step: int,
        slot: int,
        made: SlotHeader,
        meta: Mapping[str, Any],
        destinations: SaveDestinations,
    ) -> None:
        tell = partial(
            self._mover.announce_capture,
            self._rank,
            step,
            slot,
            made.sequence,
            meta,
            is_durable=destinations.is_durable,
            to_peers=destinations.to_peers,
            to_bucket=destinations.to_bucket,
        )
        try:
            tell()
        except MoverGoneError:
            tell()

    def drop_capture(self, step: int) -> None:
        """Give up a capture that is not to be announced."""
        with self._lock:
            held = self._unannounced.pop(step, None)
        if held is not None:
            self._arena.release(held[0])

    def wait_until_committed(
        self, step: int, timeout_s: float, keep_alive: Callable[[], None] = lambda: None
    ) -> str | None:
        """Wait until the checkpoint of `step` is committed; return None, or why it is not.
        Meanwhile `keep_alive` is called every few seconds."""
        try:
            return self._mover.wait_until_committed(step, timeout_s, keep_alive)
        except MoverGoneError as error:
            return str(error)

    def poll_save_end(self, step: int, wait_s: float) -> tuple[bool, str | None]:
        """As `MoverClient.poll_save_end`."""
        return self._mover.poll_save_end(step, wait_s)

    def _wait_for_slot(self, timeout_s: float) -> int | None:
        """The mover says when a slot is given back. One that is stopped is not waited for."""
        end = time.monotonic() + timeout_s
        try:
            while (left := end - time.monotonic()) > 0:
                if self._mover.wait_for_free_slot(self._rank, min(left, FREE_SLOT_POLL_S)):
                    break
        except MoverGoneError:
            return None
        return self._arena.free_slot()

    # --- layout -----------------------------------------------------------------------------
    def _lay_out(
        self, tensors: Mapping[str, torch.Tensor], slots: int
    ) -> tuple[list[list[CopySpan]], list[_ForeachGroup]]:
        """Return contiguous tensors in pieces, the rest by dtype and device."""
        spans: list[CopySpan] = []
        groups: dict[tuple[torch.dtype, torch.device], _ForeachGroup] = {}
        for p in self._placed:
            source = self._owned_view(p, tensors)
            if source.device.type == "cpu" and source.is_contiguous():
                spans.append(CopySpan(source, 0, len(self._header) + p.start, p.nbytes))
                continue
            key = (source.dtype, source.device)
            group = groups.setdefault(
                key, _ForeachGroup(source.device, [], [[] for _ in range(slots)])
            )
            group.sources.append(source)
            for slot in range(slots):
                group.targets[slot].append(self._slot_view(p, slot))
        return list(cut_into_pieces(spans)), list(groups.values())

    def _inline_pieces(self, slot: int) -> list[Piece]:
        """Return pieces that copy everything into a slot, for one thread that waits for it."""
        pieces: list[Piece] = [partial(_copy, group, slot) for group in self._strided]
        pieces += [partial(torch.accelerator.synchronize, device) for device in self._streams]
        return [*pieces, *self._memmove_pieces(slot)]

    def _background_pieces(self, slot: int) -> list[Piece]:
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
        return (partial(copy_spans, base, piece) for piece in self._spans)

    def _owned_view(self, p: PlacedBox, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
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

    def _slot_view(self, p: PlacedBox, slot: int) -> torch.Tensor:
        """The same part in a slot, as a tensor over the mapped memory."""
        flat = torch.frombuffer(
            self._arena.memory,
            dtype=TORCH_DTYPE[p.dtype],
            count=p.box.size,
            offset=self._arena.data_offset(slot) + len(self._header) + p.start,
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


def _pin_pages(arena: Arena, devices: list[torch.device]) -> None:
    """Lock the arena's pages for direct copies from a CUDA or ROCm device.

    Without it every copy goes through a bounce buffer at a fraction of the link's speed. A refusal
    costs only speed, so it is not an error.
    """
    if any(device.type == "cuda" for device in devices):
        memory = torch.frombuffer(arena.memory, dtype=torch.uint8)
        runtime: Any = torch.cuda  # cudart has no annotations
        code = runtime.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
        if int(code) != 0:
            # The runtime remembers the refusal, and torch's next launch would raise it.
            with suppress(RuntimeError):
                torch.zeros(1, device=devices[0])
