"""Counts the payload bytes that leave this rank, and the seconds of exchanges, by purpose.

Payload is what the algorithms of the literature count. It is elements times their size, without
headers, acknowledgements and the rendezvous of groups. A message counts at its sender. A collective
counts with the bytes of its bandwidth-optimal form over n ranks, for any implementation. An
all-gather or a reduce-scatter of s bytes in all sends (n - 1) / n * s, an all-reduce twice that
(Thakur et al., 2005, section 4; Rajbhandari et al., 2020, section 7).

An exchange is *under way* from its start until this rank sees its end. It is *exposed* while the
thread that computes waits for it. So what hides behind the passes is the difference of the two.
Times are the host's, so they mean something only where the host itself computes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.parallel.comm.trace import SpanRecorder

TRAFFIC_KINDS = ("reduce", "gather", "scatter", "tp", "cp", "pp", "ep", "control")
"""reduce: gradients between the members of a cell. gather, scatter: parameters and gradients on
the dp_shard axis. tp: activations of tensor parallelism. cp: what attention gets of other ranks'
tokens, and the gradients of that. pp: between pipeline stages. ep: tokens on their way to experts
and back, and their numbers. control: votes and other small exchanges."""


class TrafficCounter:
    """A counter that any thread of a rank may add to.

    recorder: is told each exchange, on a track with the name of its kind.
    """

    def __init__(self, recorder: SpanRecorder | None = None) -> None:
        self.recorder = recorder
        self._lock = threading.Lock()
        self._bytes: dict[str, int] = {}
        self._under_way: dict[str, list[tuple[float, float]]] = {}
        self._exposed: dict[str, float] = {}

    def add(self, kind: str, nbytes: int) -> None:
        """Count `nbytes` that leave this rank. Raises ValueError for an unknown kind."""
        if kind not in TRAFFIC_KINDS:
            raise ValueError(
                f"{kind!r} is no kind of traffic: use one of {', '.join(TRAFFIC_KINDS)}"
            )
        with self._lock:
            self._bytes[kind] = self._bytes.get(kind, 0) + nbytes

    @property
    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes since the last reset; kinds that sent nothing are missing."""
        with self._lock:
            return dict(self._bytes)

    def reset(self) -> None:
        """Begin again from nothing."""
        with self._lock:
            self._bytes.clear()
            self._under_way.clear()
            self._exposed.clear()

    # --- seconds --------------------------------------------------------------------------
    def note(self, kind: str, name: str, start: float, *, tells: bool = True) -> None:
        """An exchange was under way from `start`, of the monotonic clock, until now. tells: the
        recorder too."""
        stop = time.monotonic()
        with self._lock:
            self._under_way.setdefault(kind, []).append((start, stop))
        if tells and self.recorder is not None:
            self.recorder.note(kind, name, start, stop)

    @contextmanager
    def exposed(self, kind: str) -> Iterator[None]:
        """The thread that computes waits for exchanges of a kind, which are under way."""
        start = time.monotonic()
        try:
            yield
        finally:
            stop = time.monotonic()
            with self._lock:
                self._under_way.setdefault(kind, []).append((start, stop))
                self._exposed[kind] = self._exposed.get(kind, 0.0) + stop - start

    @property
    def seconds_by_kind(self) -> dict[str, list[float]]:
        """[seconds in which one was under way, seconds exposed] since the last reset, by kind."""
        with self._lock:
            return {
                kind: [covered_seconds(spans), self._exposed.get(kind, 0.0)]
                for kind, spans in self._under_way.items()
            }


def covered_seconds(spans: Sequence[tuple[float, float]]) -> float:
    """Seconds that lie in one (start, stop) at least."""
    seconds, until = 0.0, float("-inf")
    for start, stop in sorted(spans):
        seconds += max(0.0, stop - max(start, until))
        until = max(until, stop)
    return seconds


@contextmanager
def waiting(traffic: TrafficCounter | None, kind: str, name: str) -> Iterator[None]:
    """The thread that computes makes an exchange and waits for all of it. None: not counted."""
    if traffic is None:
        yield
        return
    start = time.monotonic()
    with traffic.exposed(kind):
        yield
    traffic.note(kind, name, start)
