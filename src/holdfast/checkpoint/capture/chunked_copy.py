"""A copy in pieces, which a thread processes while training computes.

    Copy(pieces, seal)   work()   by the thread that copies: takes pieces until none is left
                         fence()  by whoever must not go on before the copy is whole: takes pieces
                                  too, then waits for those that others are in the middle of
    the end of the last piece: seal, cost, listeners; then fences return

So a thread that got no core delays no step. The waiting thread copies the rest, at the speed of a
capture without a background thread. A piece is some megabytes. The interpreter lock is free during
each, and no thread waits long for a piece that another thread has begun.

Bytes move by `memmove`: one thread, no interpreter lock, a microsecond of Python per tensor.
(`torch._foreach_copy_` costs six, and may start a team of threads of its own.)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from ctypes import memmove
from dataclasses import dataclass
from typing import NamedTuple, Protocol

PIECE_BYTES = 4 * 2**20
PIECE_SPANS = 256

Piece = Callable[[], None]


class Source(Protocol):
    """Something contiguous in host memory; a tensor is one."""

    def data_ptr(self) -> int: ...


class Span(NamedTuple):
    """`length` bytes from byte `start` of a source, and where they go."""

    source: Source
    start: int
    target: int
    length: int


def cut(spans: Iterable[Span]) -> Iterator[list[Span]]:
    """The same bytes in pieces of at most PIECE_BYTES and PIECE_SPANS."""
    piece: list[Span] = []
    room = PIECE_BYTES
    for source, start, target, length in spans:
        done = 0
        while done < length:
            taken = min(room, length - done)
            piece.append(Span(source, start + done, target + done, taken))
            done, room = done + taken, room - taken
            if room == 0 or len(piece) == PIECE_SPANS:
                yield piece
                piece, room = [], PIECE_BYTES
    if piece:
        yield piece


def move(base: int, spans: Sequence[Span]) -> None:
    """Copy; targets are relative to the address `base`, which the caller keeps mapped.

    A source is asked for its address each time: one whose memory was given back says 0.
    """
    for source, start, target, length in spans:
        address = source.data_ptr()
        if address == 0:
            raise RuntimeError("a tensor has no memory any more")
        memmove(base + target, address + start, length)


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds: training was `blocked` (of which `fence` at the end), the copy took `copy`. `error`:
    why the copy is incomplete; None if it is complete."""

    blocked: float
    copy: float
    fence: float
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Captured:
    """The copy is made; training was blocked for `seconds`."""

    step: int
    seconds: float
    bytes: int


@dataclass(frozen=True, slots=True)
class Skipped:
    """No copy was made, or it will not be saved; training continues."""

    step: int
    reason: str


Listener = Callable[[Cost], None]


class Copy:
    """One copy. Every method may be called from any thread."""

    def __init__(
        self, pieces: Sequence[Piece], seal: Callable[[], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        """seal: called once, when every piece is copied, and not when one has failed."""
        self._pieces, self._seal, self._clock = pieces, seal, clock
        self._lock = threading.Lock()
        self._taken = 0
        self._left = len(pieces)
        self._error: Exception | None = None
        self._cost: Cost | None = None
        self._listeners: list[Listener] = []
        self._ended = threading.Event()
        self._begun = clock()
        self._fenced: float | None = None
        self.blocked = 0.0
        """Seconds that training paused before the copy began, without the fence's."""
        if not pieces:
            self._end()

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def work(self) -> None:
        """Copy pieces until all are taken."""
        while True:
            with self._lock:
                number = self._taken
                if number == len(self._pieces):
                    return
                self._taken += 1
            try:
                self._pieces[number]()
            except Exception as error:
                self._error = error
            with self._lock:
                self._left -= 1
                last = self._left == 0
            if last:
                self._end()

    def fence(self) -> float:
        """Wait until the copy is complete and its listeners were called; return the seconds
        waited."""
        if self._ended.is_set():
            return 0.0
        start = self._fenced = self._clock()
        self.work()
        self._ended.wait()
        return self._clock() - start

    def after(self, listener: Listener) -> None:
        """Call when the copy has ended, on the thread that ended it; at once if it has."""
        with self._lock:
            cost = self._cost
            if cost is None:
                self._listeners.append(listener)
        if cost is not None:
            listener(cost)

    def _end(self) -> None:
        try:
            error = self._error
            if error is None:
                try:
                    self._seal()
                except Exception as failed:
                    error = failed
            now = self._clock()
            fence = 0.0 if self._fenced is None else now - self._fenced
            cost = Cost(self.blocked + fence, now - self._begun, fence, error)
            with self._lock:
                self._cost, listeners = cost, self._listeners
            for listener in listeners:
                listener(cost)
        finally:
            self._ended.set()
