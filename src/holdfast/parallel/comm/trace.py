"""Spans of time of a rank's work, their summary for a pipeline, and a trace to look at.

A `SpanRecorder` belongs to one rank and may be written by several of its threads. Times come from
`time.monotonic`, which all processes of one machine share. So spans of ranks on one machine can be
compared. Across machines only lengths mean anything. A span costs about a microsecond, and its name
is what the schedule prints for the action (`1F0`).

On an accelerator the host only queues the work of an action. So the compute spans of
a traced step come from events in the device's queue. A `DeviceTimeline` puts them on the host's
clock. Waits are the host's, and keep its times.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from holdfast.core.spans import COMPUTE, TraceSpan

if TYPE_CHECKING:
    import torch

RECEIVE = "receive wait"  # an action could have begun, but for what it needs from another rank
REDUCE = "reduce"  # a bucket of the gradient is summed over ranks, during the backward pass
SEND = "send wait"  # a run could have begun, but for the arrival of what the last one sent


class DeviceEvent(Protocol):
    """What `torch.Event(enable_timing=True)` does."""

    def record(self) -> None:
        """Put it at the end of the current stream."""

    def synchronize(self) -> None:
        """Wait until the device has come to it."""

    def elapsed_time(self, other: Any, /) -> float:
        """Milliseconds from this event to the other one, by the device's clock."""
        ...


class DeviceTimeline:
    """When a device came to a place in its queue, in seconds of the host's monotonic clock.

    It waits once for the device, when it is made. Make one for each step: an event's milliseconds
    are float32, so they are exact to 1 us for some seconds only.
    """

    def __init__(self, make_event: Callable[[], DeviceEvent]) -> None:
        self._make_event = make_event
        self._first = self.mark()
        self._first.synchronize()
        self._first_s = time.monotonic()

    def mark(self) -> DeviceEvent:
        """An event behind all that the current stream has been given."""
        event = self._make_event()
        event.record()
        return event

    def seconds(self, event: DeviceEvent) -> float:
        """Wait for the event, and return its time."""
        event.synchronize()
        return self._first_s + self._first.elapsed_time(event) / 1e3


M = TypeVar("M")


class _OpenSpan(Generic[M]):
    """A span that has begun. It is written when its block ends, however that ends. mark: of now."""

    __slots__ = ("_mark", "_name", "_spans", "_start", "_track")

    def __init__(
        self, spans: list[tuple[str, str, M, M]], mark: Callable[[], M], track: str, name: str
    ) -> None:
        self._spans, self._mark, self._track, self._name = spans, mark, track, name

    def __enter__(self) -> None:
        self._start = self._mark()

    def __exit__(self, *_: object) -> None:
        self._spans.append((self._track, self._name, self._start, self._mark()))


class SpanRecorder:
    """The spans of one rank, in order of their ends. Appending to a list is atomic in Python.

    device: None, or a CPU: all times are the host's.
    make_event: of the device; a test has one of its own.
    """

    def __init__(
        self,
        device: torch.device | None = None,
        make_event: Callable[[], DeviceEvent] | None = None,
    ) -> None:
        is_on_host = device is None or device.type == "cpu"
        self._make_event = make_event
        if make_event is None and not is_on_host:
            import torch  # the report reads traces without it

            self._make_event = lambda: torch.Event(device, enable_timing=True)
        self._on_host: list[tuple[str, str, float, float]] = []
        self._on_device: list[tuple[str, str, DeviceEvent, DeviceEvent]] = []
        self._timeline: DeviceTimeline | None = None

    def begin(self, *, is_traced: bool) -> None:
        """Forget all spans. is_traced: those that follow are reported, so each is worth two
        events of the device, and all of them one wait."""
        self._on_host, self._on_device, self._timeline = [], [], None
        if is_traced and self._make_event is not None:
            self._timeline = DeviceTimeline(self._make_event)

    @property
    def spans(self) -> list[TraceSpan]:
        """All of them; it waits for the device."""
        spans = [TraceSpan(*span) for span in self._on_host]
        if self._timeline is not None:
            seconds = self._timeline.seconds
            spans += [TraceSpan(t, n, seconds(a), seconds(b)) for t, n, a, b in self._on_device]
            spans.sort(key=lambda span: span.stop)
        return spans

    def note(self, track: str, name: str, start: float, stop: float) -> None:
        """A span of the host that is over."""
        self._on_host.append((track, name, start, stop))

    def span(self, track: str, name: str) -> AbstractContextManager[None]:
        """`with recorder.span(COMPUTE, "1F0"): ...`"""
        if track == COMPUTE and self._timeline is not None:
            return _OpenSpan(self._on_device, self._timeline.mark, track, name)
        return _OpenSpan(self._on_host, time.monotonic, track, name)
