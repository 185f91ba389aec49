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
MAX_SPANS_PER_PIECE = 256

Piece = Callable[[], None]


class HostBuffer(Protocol):
    """Something contiguous in host memory; a tensor is one."""

    def data_ptr(self) -> int: ...


class CopySpan(NamedTuple):
    """`length` bytes from byte `source_offset` of a source, and where they go."""

    source: HostBuffer
    source_offset: int
    target_offset: int
    length: int


def cut_into_pieces(spans: Iterable[CopySpan]) -> Iterator[list[CopySpan]]:
    """The same bytes in pieces of at most PIECE_BYTES and PIECE_SPANS."""
    piece: list[CopySpan] = []
    room = PIECE_BYTES
    for source, start, target, length in spans:
        done = 0
        while done < length:
            taken = min(room, length - done)
            piece.append(CopySpan(source, start + done, target + done, taken))
            done, room = done + taken, room - taken
            if room == 0 or len(piece) == MAX_SPANS_PER_PIECE:
                yield piece
                piece, room = [], PIECE_BYTES
    if piece:
        yield piece


def copy_spans(base_address: int, spans: Sequence[CopySpan]) -> None:
    """Copy; targets are relative to the address `base_address`, which the caller keeps mapped.

    A source is asked for its address each time: one whose memory was given back says 0.
    """
    for source, start, target, length in spans:
        address = source.data_ptr()
        if address == 0:
            raise RuntimeError("a tensor has no memory any more")
        memmove(base_address + target, address + start, length)


@dataclass(frozen=True, slots=True)
class CopyTiming:
    """Seconds: training was `blocked_s` (of which `fence_s` at the end), the copy took `copy_s`.
    `error`: why the copy is incomplete; None if it is complete."""

    blocked_s: float
    copy_s: float
    fence_s: float
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class CompletedCapture:
    """The copy is made; training was blocked for `blocked_s`."""

    step: int
    blocked_s: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class SkippedCapture:
    """No copy was made, or it will not be saved; training continues."""

    step: int
    reason: str


CopyListener = Callable[[CopyTiming], None]


class ChunkedCopy:
    """One copy. Every method may be called from any thread."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        seal: Callable[[], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """seal: called once, when every piece is copied, and not when one has failed."""
        self._pieces, self._seal, self._clock = pieces, seal, clock
        self._lock = threading.Lock()
        self._next_piece = 0
        self._pieces_left = len(pieces)
        self._error: Exception | None = None
        self._timing: CopyTiming | None = None
        self._listeners: list[CopyListener] = []
        self._done = threading.Event()
        self._begun_at = clock()
        self._fence_began_at: float | None = None
        self.blocked_s = 0.0
        """Seconds that training paused before the copy began, without the fence's."""
        if not pieces:
            self._finish()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def copy_pieces(self) -> None:
        """Copy pieces until all are taken."""
        while True:
            with self._lock:
                number = self._next_piece
                if number == len(self._pieces):
                    return
                self._next_piece += 1
            try:
                self._pieces[number]()
            except Exception as error:
                self._error = error
            with self._lock:
                self._pieces_left -= 1
                last = self._pieces_left == 0
            if last:
                self._finish()

    def fence(self) -> float:
        """Wait until the copy is complete and its listeners were called; return the seconds
        waited."""
        if self._done.is_set():
            return 0.0
        start = self._fence_began_at = self._clock()
        self.copy_pieces()
        self._done.wait()
        return self._clock() - start

    def call_when_done(self, listener: CopyListener) -> None:
        """Call when the copy has ended, on the thread that ended it; at once if it has."""
        with self._lock:
            cost = self._timing
            if cost is None:
                self._listeners.append(listener)
        if cost is not None:
            listener(cost)

    def _finish(self) -> None:
        try:
            error = self._error
            if error is None:
                try:
                    self._seal()
                except Exception as failed:
                    error = failed
            now = self._clock()
            fence = 0.0 if self._fence_began_at is None else now - self._fence_began_at
            cost = CopyTiming(self.blocked_s + fence, now - self._begun_at, fence, error)
            with self._lock:
                self._timing, listeners = cost, self._listeners
            for listener in listeners:
                listener(cost)
        finally:
            self._done.set()
