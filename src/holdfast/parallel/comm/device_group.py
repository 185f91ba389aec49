"""A group over a device's own backend: NCCL, or another one with its habits.

- Its communicator is made by the first collective. If a peer is missing, that call hangs, and
  nothing can end it. So all ranks meet in another group before. Then a thread of its own makes one
  tiny collective (`open`).
- A lost peer is not reported: operations hang until `abort`, which every holder has to call. The
  agent, which sees the end of a process, says that a peer is lost.
- `abort` may hang itself. So each group has a thread for it, and those of several groups abort at
  the same time. One after the other, they can wait for each other.
- After `abort` the operations under way end without an error, and with void results.
- An orderly end of a group (`shutdown`) waits for the peers. So `close` aborts, too. It is called
  when a vote has shown that all traffic arrived.
- Messages have no tags: those of one group match in the order in which they were started.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

import torch
from torch import Tensor

from holdfast.core.device_progress import GroupProgress
from holdfast.errors import DeviceStuckError, PeerLostError
from holdfast.parallel.comm import lanes
from holdfast.parallel.comm.abortable_wait import AbortableGroup, AbortableWait
from holdfast.parallel.comm.comm_stats import TrafficCounter
from holdfast.parallel.torch_compat import (
    BulkGroup,
    PrefixStore,
    Store,
    Work,
    bulk_group,
    set_group_timeout,
)

ABORT_TIMEOUT_S = 10.0
"""Seconds that all aborts of a generation get together."""
OPEN_TIMEOUT_S = 120.0
"""Seconds that a communicator may take to be made. All ranks met just before."""
_POLL_S = 0.002


class Abort:
    """One group's abort, on a thread of its own."""

    def __init__(self, group: BulkGroup) -> None:
        self._group, self._done = group, threading.Event()
        threading.Thread(target=self._run, name="abort", daemon=True).start()

    def _run(self) -> None:
        with suppress(RuntimeError):  # it was aborted before, or never made
            set_group_timeout(self._group, ABORT_TIMEOUT_S)
            self._group.abort()
        self._done.set()

    def wait(self, deadline: float) -> bool:
        """Return whether it is over by the `deadline` of the monotonic clock."""
        return self._done.wait(max(0.0, deadline - time.monotonic()))


def wait_for_aborts(aborts: Iterable[Abort]) -> None:
    """Return when all aborts are over. Raises DeviceStuckError if one of them takes too long."""
    deadline = time.monotonic() + ABORT_TIMEOUT_S
    late = [each for each in aborts if not each.wait(deadline)]
    if late:
        raise DeviceStuckError(
            f"{len(late)} group(s) of a device were not given up within {ABORT_TIMEOUT_S:g} s"
        )


def open_group(
    group: BulkGroup, device: torch.device, is_given_up: Callable[[], bool], what: str
) -> None:
    """Make a group's communicator by a first, tiny collective. Raises PeerLostError if it does not
    come about; the thread that waits for it is then left behind."""
    ended, errors = threading.Event(), list[Exception]()

    def first() -> None:
        try:
            probe = torch.ones(1, device=device)
            group.allreduce([probe]).wait()
            probe.item()  # on a device this is what waits
        except Exception as error:
            errors.append(error)
        ended.set()

    threading.Thread(target=first, name="open", daemon=True).start()
    deadline = time.monotonic() + OPEN_TIMEOUT_S
    while not ended.wait(_POLL_S):
        if is_given_up():
            raise PeerLostError(f"{what} was given up while it was made")
        if time.monotonic() > deadline:
            raise PeerLostError(f"{what} was not made within {OPEN_TIMEOUT_S:g} s")
    if errors:
        raise PeerLostError(f"{what} could not be made: {errors[0]}") from errors[0]
    if is_given_up():
        raise PeerLostError(f"{what} was given up while it was made")


class DeviceGroup(AbortableGroup):
    """`size` ranks under `name` in `store`, over `backend`; see the module.

    seconds: bounds every wait. Construction does nothing with other ranks; `open` does.
    """

    def __init__(
        self,
        backend: str,
        store: Store,
        name: str,
        rank: int,
        size: int,
        device: torch.device,
        *,
        seconds: float,
        traffic: TrafficCounter | None = None,
    ) -> None:
        super().__init__(rank, size, traffic)
        self.name, self._device, self._seconds = name, device, seconds
        self._store = PrefixStore(name, store)  # torch keeps its C++ half only
        self._kept = store
        self._group: BulkGroup | None = bulk_group(backend, self._store, rank, size, seconds)
        self._abort: Abort | None = None
        self._stream: object | None = None
        self._lane_progress = lanes.LaneProgress()

    def open(self, is_given_up: Callable[[], bool]) -> None:
        """Connect; collective. is_given_up: whether this rank need not wait any more. Raises
        PeerLostError."""
        try:
            open_group(self.group, self._device, is_given_up, f"the device group {self.name}")
        except PeerLostError:
            self.abort()
            raise

    @property
    def group(self) -> BulkGroup:
        if self._group is None or self._is_aborted:
            raise PeerLostError(f"the device group {self.name} was given up")
        return self._group

    def lane(self, errand: AbortableWait) -> lanes.Lane:
        """Return the place for work on what arrives."""
        if self._stream is None:
            self._stream = lanes.DeviceLane.open(self._device)
        return lanes.DeviceLane(
            self._device, self._stream, errand, self._seconds, self._lane_progress
        )

    def progress(self) -> GroupProgress:
        """Return how far this rank's device is with what runs in the lane."""
        return GroupProgress(self.name, *self._lane_progress.read())

    def mark(self) -> object:
        """Return an event after all that the calling thread has given to the device."""
        if self._device.type == "cpu":
            return None
        return torch.accelerator.current_stream(self._device).record_event()

    # --- operations, in one order on all ranks -----------------------------------------------
    def all_reduce(self, tensor: Tensor) -> Work:
        """Start the backend's own sum in place."""
        self.count(2 * (self.size - 1) * tensor.nbytes // self.size)
        return self.group.allreduce([tensor])

    def all_to_all(
        self, out: Tensor, tensor: Tensor, out_sizes: list[int], sizes: list[int]
    ) -> Work:
        """Start to send the i-th run of `tensor`, of sizes[i] elements, to rank i, and to receive
        the i-th run of `out` from it."""
        self.count((sum(sizes) - sizes[self.rank]) * tensor.element_size())
        return self.group.alltoall_base(out, tensor, out_sizes, sizes)

    def all_gather(self, out: Tensor, part: Tensor) -> Work:
        """Start to gather parts of one size in rank order.  part: [t] -> out: [size * t]"""
        self.count(part.nbytes * (self.size - 1))
        return self.group._allgather_base(out, part)

    def send(self, tensor: Tensor, peer: int, kind: str) -> Work:
        """Start to send; the peer receives in the same order. kind: of traffic."""
        self.count(tensor.nbytes, kind)
        return self.group.send([tensor], peer, 0)

    def receive(self, tensor: Tensor, peer: int) -> Work:
        """Start to receive the peer's next message."""
        return self.group.recv([tensor], peer, 0)

    # --- the end -------------------------------------------------------------------------------
    def forget_sends(self) -> None:
        """Do nothing: the backend keeps what is on its way."""

    def abort(self) -> None:
        """Give the group up; return at once. Errands first: what arrives from now on is void."""
        self._abort_waits()
        with self._lock:
            if self._abort is None and self._group is not None:
                self._abort = Abort(self._group)

    @property
    def aborts(self) -> list[Abort]:
        """What `abort` has begun."""
        return [] if self._abort is None else [self._abort]

    def close(self) -> None:
        """Leave the group. Raises DeviceStuckError."""
        self.abort()
        wait_for_aborts(self.aborts)
        self._group = None


class PipelinePipes:
    """What travels between neighbours of a pipeline, over a backend whose messages have no tags.

    Each pair of neighbours has two groups of two. In each of them one rank only sends and the other
    only receives. So nothing waits for an operation that was started before it, and messages match
    in their order. The order is the one in which the sender's row of the schedule gives them. If
    the receiver needs a later one first, it takes those before it, too, and keeps them.

    groups: by the neighbour's index on `pp`, and whether this rank sends in it.
    """

    def __init__(self, groups: Mapping[tuple[int, bool], DeviceGroup]) -> None:
        self._groups = dict(groups)

    def send(self, tensor: Tensor, peer: int) -> Work:
        group = self._groups[peer, True]
        return group.send(tensor, 1 - group.rank, "pp")

    def receive(self, tensor: Tensor, peer: int) -> Work:
        group = self._groups[peer, False]
        return group.receive(tensor, 1 - group.rank)

    def abort(self) -> None:
        """Give all groups up; return at once."""
        for group in self._groups.values():
            group.abort()

    @property
    def aborts(self) -> list[Abort]:
        return [abort for group in self._groups.values() for abort in group.aborts]
