"""Copies between a device and locked host memory, on streams that run late.

A stream here is a list of jobs that nothing runs until an event is waited for on the host. Code
that reads a tensor too early, or uses a buffer again too early, finds the old content.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.parallel.comm.host_buffers import HostCopies, rounded_bytes


class Event:
    def __init__(self, stream: Stream, jobs: int) -> None:
        self.stream, self.jobs = stream, jobs

    def query(self) -> bool:
        return self.stream.done >= self.jobs

    def synchronize(self) -> None:
        self.stream.run(self.jobs)


class Stream:
    """current: the stream that gets the copies of this thread."""

    current: Stream

    def __init__(self, device: torch.device | None = None) -> None:
        self.queue: list[Callable[[], object]] = []
        self.done = 0

    def run(self, jobs: int) -> None:
        while self.done < jobs:
            self.done += 1
            self.queue[self.done - 1]()

    def record_event(self) -> Event:
        return Event(self, len(self.queue))

    def wait_event(self, event: Event) -> None:
        self.queue.append(event.synchronize)

    def __enter__(self) -> None:
        self.before, Stream.current = Stream.current, self

    def __exit__(self, *_: object) -> None:
        Stream.current = self.before


class Late(HostCopies):
    """Copies of a device whose memory is the host's."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self._is_host = False


@pytest.fixture
def compute(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """The stream that computes. Copies go into the current stream, and run later."""
    Stream.current = Stream()
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: Stream.current)
    copy: Any = Tensor.copy_

    def later(into: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if non_blocking:
            Stream.current.queue.append(lambda: copy(into, source))
        else:
            copy(into, source)
        return into

    monkeypatch.setattr(Tensor, "copy_", later)
    return Stream.current


def test_what_is_sent_is_final_and_what_arrives_is_waited_for(compute: Stream) -> None:
    copies, sent, received = Late(), torch.zeros(3), torch.zeros(3)
    compute.queue.append(lambda: sent.fill_(5.0))  # computed, but not yet
    buffer = copies.take_out(sent)
    assert buffer.tensor.tolist() == [5.0] * 3
    seen: list[Any] = []
    compute.queue.append(lambda: received.fill_(1.0))  # still uses what is overwritten
    copies.put_back(buffer, received)
    compute.queue.append(lambda: seen.append(received.tolist()))
    assert received.tolist() == [0.0] * 3, "the host does not wait"
    compute.run(len(compute.queue))
    assert seen == [[5.0] * 3]


def test_a_buffer_is_used_again_once_the_device_has_read_it(compute: Stream) -> None:
    copies, tensor = Late(), torch.zeros(1000)
    buffer = copies.take_out(tensor)
    copies.put_back(buffer, tensor)
    place = buffer.tensor.data_ptr()
    del buffer
    other = copies.arena.take(tensor)
    assert other.tensor.data_ptr() != place, "the device has not read it"
    compute.run(len(compute.queue))
    del other
    kept = [copies.arena.take(tensor) for _ in range(2)]
    assert place in {each.tensor.data_ptr() for each in kept}
    assert copies.arena.made_bytes == 2 * rounded_bytes(tensor.nbytes)


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 4097, 10**6, 2**20 + 1, 123_456_789])
def test_buffers_are_at_most_a_quarter_too_long(nbytes: int) -> None:
    size = rounded_bytes(nbytes)
    assert nbytes <= size <= max(4096, 1.25 * nbytes)
    assert rounded_bytes(size) == size
