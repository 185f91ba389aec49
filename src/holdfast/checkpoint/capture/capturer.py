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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import torch

from holdfast.checkpoint.capture.chunked_copy import ChunkedCopy, CopyListener, CopyTiming
from holdfast.checkpoint.capture.chunked_copy import CompletedCapture as CompletedCapture
from holdfast.checkpoint.capture.chunked_copy import SkippedCapture as SkippedCapture
from holdfast.checkpoint.capture.copy_plan import CopyPlan
from holdfast.checkpoint.format.blob import blob_header, blob_size
from holdfast.checkpoint.memory.arena import Arena, SlotHeader, identity_digest, slot_capacity
from holdfast.checkpoint.mover.client import MoverClient, MoverGoneError
from holdfast.core.format.manifest import place_boxes
from holdfast.core.json_parsing import Json
from holdfast.core.sharding.ownership import owned_boxes
from holdfast.core.sharding.state_table import StateTable, local_boxes
from holdfast.errors import FencedError, HoldfastError
from holdfast.layout import Topology
from holdfast.policy.saving.destinations import DURABLE, SaveDestinations

FREE_SLOT_POLL_S = 2.0
"""Seconds of one question for a free slot: a mover that is stopped answers none."""


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
        numa_node: int | None = None,
    ) -> None:
        """Ask the mover for an arena and lay the views out.

        has_released_old_memory: every capturer that this process had in older generations is
        closed, so that their memory may be used again. numa_node: the state's device is near this
        node; None: any.
        Raises CheckpointError when a tensor does not have the shape or dtype that the table and
        the topology give it on this rank.
        """
        self.skipped = 0
        self._mover = mover
        self._rank = rank
        self._run = identity_digest(run)
        boxes = owned_boxes(topology, table, self._rank)
        placed = place_boxes(boxes, table)
        held = {b.name: b for b in local_boxes(topology, table, rank)}
        self._header = blob_header(placed)
        self._layout = identity_digest(self._header)
        self._length = blob_size(self._header, placed)
        fd = mover.get_arena(
            self._rank, slot_capacity(self._length), slots, has_released_old_memory, numa_node
        )
        self._arena, self._inode = _map_arena(fd)
        self._copy_plan = CopyPlan(self._arena, placed, len(self._header), rank, held, tensors)
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
            self._copy_plan.background_pieces(slot), partial(self._write_slot_header, step, slot)
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
            self._copy_plan.inline_pieces(slot), partial(self._write_slot_header, step, slot)
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
        try:
            self.fence()
            self._copy_threads.shutdown()
            self._copy = None
        finally:
            self._copy_plan.close()

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
        return SkippedCapture(step, "the disk is still busy with the snapshots before it")

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
        self, step: int, meta: Mapping[str, Json], destinations: SaveDestinations = DURABLE
    ) -> SkippedCapture | None:
        """Have the mover save what was captured, or keep it in memory; None when it has taken it
        over.

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
        hand_over = partial(
            self._mover.announce_capture, self._rank, step, slot, made.sequence, meta, destinations
        )
        try:
            try:
                hand_over()
            except MoverGoneError:
                hand_over()
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


def _map_arena(fd: int) -> tuple[Arena, int]:
    """Map the arena behind a descriptor, and close that; the inode tells its file from others."""
    try:
        return Arena(fd), os.fstat(fd).st_ino
    finally:
        os.close(fd)
