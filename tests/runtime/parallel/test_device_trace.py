"""Spans of an accelerator: a stand-in device that works through its queue later than the host."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from holdfast.parallel.comm.trace import COMPUTE, RECEIVE, SpanRecorder


@dataclass
class Queue:
    """A device whose clock has another origin. `run` gives it work of so many seconds."""

    clock_ms: float = 5e6
    waits: int = 0

    def run(self, seconds: float) -> None:
        self.clock_ms += seconds * 1e3


@dataclass
class Event:
    queue: Queue
    at_ms: float | None = field(default=None)

    def record(self) -> None:
        self.at_ms = self.queue.clock_ms

    def synchronize(self) -> None:
        assert self.at_ms is not None, "an event that is not in the queue is never reached"
        self.queue.waits += 1

    def elapsed_time(self, other: Event, /) -> float:
        assert self.at_ms is not None
        assert other.at_ms is not None
        return other.at_ms - self.at_ms


def test_compute_has_the_devices_times_and_a_wait_the_hosts() -> None:
    queue = Queue()
    recorder = SpanRecorder(torch.device("cpu"), lambda: Event(queue))
    recorder.begin(is_traced=True)
    begun = time.monotonic()
    with recorder.span(COMPUTE, "F0"):
        queue.run(100.0)  # the host only queues it
    with recorder.span(RECEIVE, "F1"):
        pass
    queue.run(20.0)
    with recorder.span(COMPUTE, "B0"):
        queue.run(300.0)
    wait, forward, backward = recorder.spans
    assert (wait.name, forward.name, backward.name) == ("F1", "F0", "B0")
    assert abs(forward.seconds - 100.0) < 1e-6
    assert abs(backward.seconds - 300.0) < 1e-6
    assert abs(backward.start - forward.stop - 20.0) < 1e-6
    assert wait.stop <= time.monotonic()
    assert abs(forward.start - begun) < 60, "on the host's clock"


def test_a_step_that_is_not_traced_asks_nothing_of_the_device() -> None:
    queue = Queue()
    recorder = SpanRecorder(torch.device("cpu"), lambda: Event(queue))
    recorder.begin(is_traced=False)
    with recorder.span(COMPUTE, "F0"):
        queue.run(100.0)
    (span,) = recorder.spans
    assert queue.waits == 0
    assert span.seconds < 60
    recorder.begin(is_traced=True)
    assert recorder.spans == []
