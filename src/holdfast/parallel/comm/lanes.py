"""Work next to the passes: a thread on the host, or a stream of the device.

A backend for a device does not make its caller wait. `work.wait()` only orders what the calling
stream does later. So code that reads an arrived tensor runs in a lane, after the lane's `wait`.
A lane of the host is the thread itself, and its `wait` blocks. The code is the same for both.

Nothing on a device reports a lost peer. So `finish` polls: it ends when all is done, when the group
is given up, or when its time is over. After a group was given up its operations end with void
results. `settle` waits for that, because the buffers are free only then.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from holdfast.errors import DeviceStuckError
from holdfast.parallel.comm.abortable_wait import AbortableWait
from holdfast.parallel.torch_compat import Work

_POLL_S = 0.0005  # seconds between two looks at a device. A look costs some microseconds
SETTLE_TIMEOUT_S = 10.0
"""Seconds in which a device has to end what a group that was given up had begun."""


class Lane:
    """An order of work next to the calling thread's, which one thread uses: here that thread."""

    runs_later = False  # whether `run` returns before the work is done

    def __init__(self, errand: AbortableWait) -> None:
        self._errand = errand

    def follow(self, mark: Any) -> None:
        """What is run later comes after `mark`, which the group's `mark` returned. A mark of the
        host lies in the past."""

    def run(self, job: Callable[[], object]) -> None:
        """Add work, in which `wait` may be called."""
        job()

    def wait(self, work: Work) -> None:
        """What is run later in the lane comes after `work`."""
        self._errand.wait(work)

    def finish(self) -> None:
        """Return when all that was run is done. Raises RuntimeError when it cannot be."""

    def settle(self) -> None:
        """Return when nothing that was run is under way. Raises DeviceStuckError. On the host a
        group that is given up ends its waits by itself."""


class LaneProgress:
    """Counts the jobs of one group's lane. The lane's thread writes; any thread may read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._launched = self._ended = 0
        self._unreached: deque[Any] = deque()  # an event before each job, in order
        self._undone: deque[Any] = deque()  # and one after it

    def begin(self, event: Any) -> None:
        """Note a job that the device reaches when `event` is over."""
        with self._lock:
            self._drop_past()
            self._launched += 1
            self._unreached.append(event)

    def end(self, event: Any) -> None:
        """Note that this job is done when `event` is over."""
        with self._lock:
            self._ended += 1
            self._undone.append(event)

    def read(self) -> tuple[int, int, int]:
        """Return the number of jobs launched, reached by the device, and done."""
        with self._lock:
            self._drop_past()
            reached, done = len(self._unreached), len(self._undone)
            return self._launched, self._launched - reached, self._ended - done

    def _drop_past(self) -> None:
        for events in (self._unreached, self._undone):
            while events and events[0].query():
                events.popleft()


class DeviceLane(Lane):
    """A stream of a device, which `open` made. seconds: that `finish` waits at most. progress: of
    the stream's group."""

    runs_later = True

    def __init__(
        self,
        device: torch.device,
        stream: Any,
        errand: AbortableWait,
        seconds: float,
        progress: LaneProgress,
    ) -> None:
        super().__init__(errand)
        self._device, self._stream, self._progress = device, stream, progress
        self._seconds = seconds

    @staticmethod
    def open(device: torch.device) -> Any:
        """Return a stream, of which a group has one: its buffers belong to that."""
        return torch.Stream(device)

    def follow(self, mark: Any) -> None:
        self._stream.wait_event(mark)

    def run(self, job: Callable[[], object]) -> None:
        self._progress.begin(self.record())
        self._launch(job)
        self._progress.end(self.record())

    def _launch(self, job: Callable[[], object]) -> None:
        def on_stream() -> None:
            with self._stream:
                job()

        self._errand.block(on_stream)  # to launch may wait for the device

    def wait(self, work: Work) -> None:
        work.wait()

    def finish(self) -> None:
        ended, deadline = self.record(), time.monotonic() + self._seconds
        while not ended.query():
            self._errand.check()
            if time.monotonic() > deadline:
                raise RuntimeError(f"NCCL: nothing came from the other ranks in {self._seconds} s")
            self._errand.pause(_POLL_S)
        self._errand.check()  # it may have ended because the group was given up

    def settle(self) -> None:
        ended, deadline = self.record(), time.monotonic() + SETTLE_TIMEOUT_S
        while not ended.query():
            if time.monotonic() > deadline:
                raise DeviceStuckError(
                    f"{self._device} still works on a group that was given up "
                    f"{SETTLE_TIMEOUT_S:g} s ago"
                )
            time.sleep(_POLL_S)

    def record(self) -> Any:
        """Return an event after all that was run."""
        ended: Any = torch.Event(self._device)
        self._stream.record_event(ended)
        return ended
