"""A backend with NCCL's habits on the CPU: gloo under another name, with less help.

    from tests.support import fake_nccl
    fake_nccl.install()        # in this process: device "cpu" now has this backend

- Messages have no tags: those of a pair match in the order in which they were started.
- The communicator is made by the first operation. With a missing peer that call hangs, and `abort`
  hangs until it returns.
- No operation makes its caller wait. Those of a group run one after another, later.
- The end of a peer is not reported: waits hang until this process calls `abort`. Nor does the abort
  of one holder tell the other ranks.
- After `abort` all operations under way end without an error, and their outputs hold garbage.
- `shutdown` waits for all ranks.
- What carries the data stands in a log alone.

A stream of a device is a thread here (`FakeLane`). Code that reads a tensor outside of its lane
finds it unfinished, as on a device.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeProcessGroup

from holdfast.core import devices
from holdfast.core.devices import DeviceKind
from holdfast.elastic.worker import stuck_threads
from holdfast.parallel.comm import lanes
from holdfast.parallel.comm.transport import PeerGroup

NAME = "fakenccl"
GARBAGE = 1e30
ABORTED = "NCCL communicator was aborted (stand-in)"

KIND = DeviceKind(
    "cpu",
    inside=NAME,
    between=NAME,
    has_index=False,
    ranks_per_device=0,
    pins_batches=False,
    chunk_elements=2**24,
    log_variable="NCCL_DEBUG_FILE",
)
"""The stand-in's row of the device table: computes as the CPU does, and communicates as CUDA."""


_hangs = threading.Event()
hang_kernels = _hangs.set
"""From now on the kernels of this process's device hang, until the process ends."""
_said = {"transport": "P2P/CUMEM/read"}


def install(transport: str = "P2P/CUMEM/read", **changes: Any) -> None:
    """Give the device "cpu" of this process the stand-in. transport: that its log names, as in
    `core/transports.py`. changes: of its row in the table."""
    register()
    _said["transport"] = transport
    kind = replace(KIND, **changes)
    devices.DEVICES = MappingProxyType({**devices.DEVICES, "cpu": kind})
    lanes.DeviceLane = FakeLane  # type: ignore[misc]
    stuck_threads._uses_device = lambda: True  # a device computes unseen


def register() -> None:
    """Make the backend known to torch."""
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, FakeNccl, devices=["cpu"])


Run = Callable[[PeerGroup, Tensor], Any]
"""Start an operation; the tensor takes its output."""


class FakeWork(dist._Work):  # type: ignore[name-defined]
    """One operation. `wait` blocks, as all that follows on a stream would; it never raises."""

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.ended, self.outputs, self._lock = threading.Event(), list(outputs), threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.ended.wait()
        return True

    def is_completed(self) -> bool:
        return self.ended.is_set()

    def end_with_garbage(self) -> None:
        """End, unless it has ended."""
        with self._lock:
            if self.ended.is_set():
                return
            for output in self.outputs:
                output.detach().fill_(GARBAGE if output.is_floating_point() else 77)
            self.ended.set()

    def end_with(self, arrived: Tensor) -> None:
        """End with what has arrived, unless it has ended. An operation has one output or none."""
        with self._lock:
            if self.ended.is_set():
                return
            for output in self.outputs:
                output.detach().copy_(arrived)
            self.ended.set()


class FakeNccl(dist.ProcessGroup):
    """A group of the stand-in. torch's registry takes it as one of its own."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg, arg-type]
        self._store, self._at, self._count, self._timeout = store, rank, size, timeout
        self._peers: PeerGroup | None = None
        self._creation, self._lock = threading.Lock(), threading.Lock()
        self._aborted = threading.Event()
        self._queue: queue.Queue[tuple[FakeWork, Run]] = queue.Queue()
        self._under_way: set[FakeWork] = set()
        self._sent, self._received = [0] * size, [0] * size
        # torch keeps a group's name there. Operations come to the methods of this class instead.
        nameless = FakeProcessGroup._create_internal(rank, size)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, nameless)

    # --- what a caller sees ----------------------------------------------------------------------
    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    def name(self) -> str:
        return NAME

    def rank(self) -> int:
        return self._at

    def size(self) -> int:
        return self._count

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing: no wait of this backend has one."""

    def abort(self) -> None:
        """End what is under way here, with garbage. The other holders hang on."""
        with self._creation:  # a creation that hangs cannot be reached
            self._aborted.set()
        if self._peers is not None:
            self._peers.abort()
        with self._lock:
            under_way, self._under_way = self._under_way, set()
        for work in under_way:
            work.end_with_garbage()

    def shutdown(self) -> None:
        """Wait for all ranks, as an orderly end does."""
        if not self._aborted.is_set() and self._peers is not None:
            self.barrier().wait()

    # --- operations ------------------------------------------------------------------------------
    def allreduce(self, tensors: Any, opts: Any = None, *more: Any) -> FakeWork:
        (tensor,) = tensors if isinstance(tensors, list) else (tensors,)
        return self._start([tensor], lambda peers, out: peers.all_reduce(out.copy_(tensor)))

    def broadcast(self, tensors: list[Tensor], opts: Any) -> FakeWork:
        (tensor,), root = tensors, opts.rootRank

        def run(peers: PeerGroup, out: Tensor) -> Any:
            if self._at != root:
                return peers.receive(out, root, self._tag(self._received, root))
            out.copy_(tensor)
            for peer in peers.others:
                peers.send(tensor, peer, self._tag(self._sent, peer))
            return None

        return self._start([tensor], run)

    def _allgather_base(self, out: Tensor, part: Tensor, opts: Any = None) -> FakeWork:
        return self._start([out], lambda peers, whole: peers.all_gather(whole, part))

    def all_gather_single(self, out: Tensor, part: Tensor, opts: Any = None) -> FakeWork:
        return self._allgather_base(out, part)

    def alltoall_base(
        self, out: Tensor, tensor: Tensor, out_sizes: Any, sizes: Any, opts: Any = None
    ) -> FakeWork:
        def run(peers: PeerGroup, arrived: Tensor) -> Any:
            return peers.all_to_all(arrived, tensor, list(out_sizes), list(sizes))

        return self._start([out], run)

    def all_to_all_single(self, *arguments: Any) -> FakeWork:
        return self.alltoall_base(*arguments)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> FakeWork:
        (tensor,) = tensors
        number = self._tag(self._sent, peer)
        return self._start([], lambda peers, _: peers.group.send([tensor], peer, number))

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> FakeWork:
        (tensor,) = tensors
        number = self._tag(self._received, peer)
        return self._start([tensor], lambda peers, out: peers.receive(out, peer, number))

    def barrier(self, opts: Any = None) -> FakeWork:
        return self.allreduce([torch.ones(1)])

    # --- inside ----------------------------------------------------------------------------------
    @staticmethod
    def _tag(counts: list[int], peer: int) -> int:
        """The number of a message of a pair takes the place of the tag that there is not."""
        counts[peer] += 1
        return 64 + counts[peer]

    def _start(self, outputs: Sequence[Tensor], run: Run) -> FakeWork:
        """Begin an operation of at most one output. gloo receives elsewhere, and may do so after an
        abort. Nothing of a device's backend writes once its operations have ended."""
        self._create()
        work = FakeWork(outputs)
        with self._lock:
            if self._aborted.is_set():
                raise RuntimeError(ABORTED)
            self._under_way.add(work)
        self._queue.put((work, run))
        return work

    def _create(self) -> None:
        """Meet the other ranks; by the first operation, and in its caller's thread."""
        with self._creation:
            if self._aborted.is_set():
                raise RuntimeError(ABORTED)
            if self._peers is None:
                seconds = self._timeout.total_seconds()
                self._peers = PeerGroup(self._store, NAME, self._at, self._count, seconds=seconds)
                self._tell_transport()
                threading.Thread(target=self._serve, name=NAME, daemon=True).start()

    def _tell_transport(self) -> None:
        """Write the log of a communicator, as NCCL does when it makes one."""
        at, peer, way = self._at, (self._at + 1) % self._count, _said["transport"]
        end = " [send]" if way.startswith("NET") else ""
        line = f"Channel 00/0 : {at}[{at}] -> {peer}[{peer}]{end} via {way}"
        if path := os.environ.get(KIND.log_variable):
            with open(path, "a") as log:
                print(f"node:1:1 [{at}] NCCL INFO {line}", file=log)

    def _serve(self) -> None:
        assert self._peers is not None
        while not self._aborted.is_set():
            work, run = self._queue.get()
            arrived = torch.empty_like(work.outputs[0]) if work.outputs else torch.empty(0)
            try:
                found = run(self._peers, arrived)
                if found is not None:
                    found.wait()
            except Exception:  # a peer is lost, and no call says so
                self._aborted.wait()
                work.end_with_garbage()
                return
            with self._lock:
                self._under_way.discard(work)
            work.end_with(arrived)


class FakeEvent:
    def __init__(self) -> None:
        self._ended = threading.Event()
        self.set = self._ended.set

    def query(self) -> bool:
        return self._ended.is_set()


class FakeLane(lanes.DeviceLane):
    """A stream as a thread: what is run, runs later, in order."""

    @staticmethod
    def open(device: torch.device) -> Any:
        jobs: queue.Queue[Callable[[], object]] = queue.Queue()

        def serve() -> None:
            while True:
                job = jobs.get()
                if _hangs.is_set():
                    threading.Event().wait()
                try:
                    job()
                except Exception as error:
                    if "aborted" not in str(error) and "given up" not in str(error):
                        raise

        threading.Thread(target=serve, name="stream", daemon=True).start()
        return jobs

    def follow(self, mark: Any) -> None:
        """Do nothing: what a thread of the CPU has computed is there."""

    def _launch(self, job: Callable[[], object]) -> None:
        self._stream.put(job)

    def record(self) -> Any:
        ended = FakeEvent()
        self._stream.put(ended.set)
        return ended
