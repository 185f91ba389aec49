"""The two sides of the comparison, as ways of saving that know when a save is safe.

DCP's asynchronous save copies the state into local memory (its first level) while training pauses.
A thread, or a process, of its own writes from there into the network storage. Ours copies in the
background of the step into the mover's arena. The mover sends it to a staging machine and writes it
into the same storage.
"""

from __future__ import annotations

import io
import os
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from benchmarks.runtime.saving.task import Way
from benchmarks.runtime.staging.storage import SENT, Sink, Storage
from holdfast.checkpoint.capture.capturer import Capturer
from holdfast.checkpoint.capture.chunked_copy import ChunkedCopy, CopyTiming
from holdfast.checkpoint.mover.client import MoverClient
from holdfast.core.sharding.state_table import TensorSpec
from holdfast.events import CheckpointCommitted, CheckpointFailed, PeerFailed, SnapshotKept
from holdfast.layout import Layout, place_layout
from holdfast.wire.secret import Secret

OURS = "ours, staged"
DEFAULT, KEPT = "DCP async", "DCP async, stager kept"
PROCESS = "DCP async, process"
NODE = "DCP, own staging node"
WAYS = (DEFAULT, KEPT, PROCESS, NODE, OURS)
SLOTS = 3
WAIT = 120.0


@dataclass(frozen=True)
class Places:
    """Targets of a way: addresses of the network storage and of a staging node's memory, and the
    mover's socket and secret."""

    storage: str
    node: str = ""
    socket: str = ""
    secret: str = ""


@dataclass
class Ends:
    """The times when one save was safe, in seconds of the trainer's monotonic clock."""

    outside: float | None = None  # of the machine that trains
    stored: float | None = None  # in the network storage
    error: str | None = None


class SafeWay(Way, Protocol):
    """A way of saving that says when each save was safe."""

    stores: bool  # True if in the network storage; otherwise a save ends when it is outside

    def ends(self, step: int) -> Ends: ...


# --- PyTorch's ------------------------------------------------------------------------------
class NetworkFiles(FileSystem):
    """DCP's view of the storage. A file is there when its stream has been closed."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with io.BufferedWriter(Sink(self._storage, str(path)), SENT) as stream:
            yield stream

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return f"{path}/{suffix}"

    def init_path(self, path: str | os.PathLike[str]) -> str:
        return str(path)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        self._storage.rename(str(path), str(new_path))

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """The storage has no folders."""

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return self._storage.size(str(path)) >= 0

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        self._storage.delete(str(path))


class Dcp:
    """`dcp.async_save` into the storage, or (NODE) into a staging node's memory."""

    def __init__(self, name: str, places: Places, state: Mapping[str, Tensor]) -> None:
        self.stores = name != NODE
        self._storage = Storage(places.storage if self.stores else places.node)
        self._state = dict(state)
        self._keeps, self._apart = name != DEFAULT, name == PROCESS
        self._stager = self._made() if self._keeps else None
        self._ends: dict[int, Ends] = {}
        self._saving: Future[Any] | None = None

    def begin(self, step: int) -> None:
        self.finish()  # one at a time: it says so itself
        self._ends[step] = ends = Ends()
        writer = FileSystemWriter(f"dcp-{step}", sync_files=False)
        writer.fs = NetworkFiles(self._storage)
        writer.path = f"dcp-{step}"
        stager = self._stager or self._made()
        kind = AsyncCheckpointerType.PROCESS if self._apart else AsyncCheckpointerType.THREAD
        made = dcp.async_save(
            self._state, storage_writer=writer, async_stager=stager, async_checkpointer_type=kind
        )
        assert isinstance(made, Future)
        self._saving = made

        def ended(done: Future[Any]) -> None:
            if (error := done.exception()) is not None:
                ends.error = f"{type(error).__name__}: {error}"
                return
            ends.outside = time.monotonic()
            ends.stored = ends.outside if self.stores else None
            self._storage.delete(f"dcp-{step - 1}/")
            if not self._keeps:
                stager.close()

        made.add_done_callback(ended)

    def fence(self) -> None: ...

    def ends(self, step: int) -> Ends:
        return self._ends[step]

    def finish(self) -> None:
        if self._saving is not None:
            self._saving.result()
            self._saving = None

    def close(self) -> None:
        self.finish()
        if self._stager is not None:
            self._stager.close()

    def _made(self) -> DefaultStager:
        """`async_save`'s own, where none is given; shared with the other process if there is one.
        (Asynchronous staging and pinned memory want an accelerator.)"""
        return DefaultStager(StagingOptions(False, self._apart, False, False))


# --- ours -----------------------------------------------------------------------------------
@dataclass
class _Watch:
    """Asks the mover what has happened, on a thread of its own, as an agent does."""

    client: MoverClient
    ends: dict[int, Ends] = field(default_factory=dict)
    leave: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        mark = 0
        while not self.leave.is_set():
            events, mark = self.client.events(mark, 0.5)
            now = time.monotonic()
            for event in events:
                ends = self.ends.setdefault(event.step, Ends())
                if isinstance(event, SnapshotKept):
                    ends.outside = now
                elif isinstance(event, CheckpointCommitted):
                    ends.stored = now
                elif isinstance(event, CheckpointFailed | PeerFailed):
                    ends.error = event.reason


class Staged:
    """A worker's capture and announcement, with a real mover behind it."""

    stores = True

    def __init__(self, places: Places, state: Mapping[str, Tensor]) -> None:
        topology = place_layout(Layout(), 1, ("here",))
        table = tuple(TensorSpec(n, "F32", tuple(t.shape), 0) for n, t in state.items())
        client = MoverClient(places.socket, Secret.from_hex(places.secret), 1)
        client.expect(topology, table)
        self._capturer = Capturer(client, topology, table, 0, dict(state), run="bench", slots=SLOTS)
        self._reporter = ThreadPoolExecutor(1, "reporter")
        self._watch = _Watch(client)
        self._watcher = threading.Thread(target=self._watch.run, daemon=True)
        self._watcher.start()
        self._newest = 0

    def begin(self, step: int) -> None:
        self._newest = step
        self._watch.ends.setdefault(step, Ends())
        begun = self._capturer.begin(step)
        assert isinstance(begun, ChunkedCopy), begun
        self._capturer.call_when_copied(step, lambda cost: self._copied(step, cost))

    def _copied(self, step: int, cost: CopyTiming) -> None:
        """On the thread that made the copy, as in a worker."""
        assert cost.error is None, cost.error
        self._reporter.submit(self._tell, step)

    def _tell(self, step: int) -> None:
        skipped = self._capturer.announce(step, {"position": 0})
        if skipped is not None:
            self._watch.ends[step].error = skipped.reason

    def fence(self) -> None:
        self._capturer.fence()

    def ends(self, step: int) -> Ends:
        return self._watch.ends[step]

    def finish(self) -> None:
        reason = self._capturer.wait_until_committed(self._newest, WAIT)
        assert reason is None, reason

    def close(self) -> None:
        self._watch.leave.set()
        self._watcher.join()
        self._capturer.close()
        self._reporter.shutdown()


def make(name: str, places: Places, state: Mapping[str, Tensor]) -> SafeWay:
    return Staged(places, state) if name == OURS else Dcp(name, places, state)
