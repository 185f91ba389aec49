"""Journal segments in a bucket. Object stores cannot append, so a segment is a row of pieces.

    journal/<generation>/<writer>.jsonl/.piece-<number>           one append
    journal/<generation>/<writer>.jsonl/.piece-<first>-<last>     these appends in one object

Reading joins the pieces. Their number would grow for ever, and each look of a reader lists them
all. So the writer puts `MERGED_PIECES` of them into one object, up to `MERGED_BYTES`, and removes
them afterwards. A reader that meets both takes the larger one. If a piece vanishes between listing
and reading, the reader lists once more. A piece's bytes have the same place in the segment in both.
"""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

from holdfast.errors import CorruptError, HoldfastError
from holdfast.wire.store.bucket_objects import BucketObjects, Entries
from holdfast.wire.store.run_store import AlreadyExistsError, MissingKeyError

APPEND_INTERVAL_S = 1.0
"""Seconds between two pieces of one writer, if nothing waits for them: what a lost machine loses of
its journal."""
MERGED_PIECES = 64
MERGED_BYTES = 2**20
"""A merged object of this size stays as it is; a smaller one is written again, with more pieces."""
MAX_LISTINGS = 4
"""Listings of a segment whose pieces are being merged, until they fit together."""
_PIECE = re.compile(r"(.+)/\.piece-(\d{10})(?:-(\d{10}))?")
T = TypeVar("T")
R = TypeVar("R")


class RunParallel(Protocol):
    """Calls a function for each item, several at a time."""

    def __call__(self, work: Callable[[T], R], items: Iterable[T]) -> Sequence[R]: ...


class _Piece(NamedTuple):
    """An object with the appends `first` to `last` of a segment."""

    first: int
    last: int
    path: str
    size: int


@dataclass
class _Tail:
    """The newest appends of a writer, which are to become one object."""

    first: int = 0
    content: bytearray = field(default_factory=bytearray)
    paths: list[str] = field(default_factory=list)


@dataclass
class _Segment:
    """Number of a segment's next piece, and the content that may have arrived unseen."""

    next_piece: int = -1  # not known yet
    tail: _Tail = field(default_factory=_Tail)
    lock: threading.Lock = field(default_factory=threading.Lock)
    unconfirmed: bytes = b""
    unconfirmed_mark: str = ""


class BucketSegments:
    """The journal segments of one bucket. Safe to use from any thread."""

    def __init__(self, objects: BucketObjects, run_parallel: RunParallel) -> None:
        self._objects, self._run_parallel = objects, run_parallel
        self._segments: dict[str, _Segment] = {}
        self._listed: dict[str, list[_Piece]] = {}  # by the last `sizes`
        self._lock = threading.Lock()  # of `_segments`

    # --- writing ----------------------------------------------------------------------------
    def begin(self, key: str, content: bytes) -> None:
        """Store the first piece. Raises AlreadyExistsError if the segment has one."""
        if self._list_pieces(key):
            raise AlreadyExistsError(f"{key} exists already")
        self._objects.create(key, _piece_path(key, 0), content, secrets.token_hex(16))

    def append(self, key: str, content: bytes) -> None:
        """Store one more piece. A repeated append begins with the same bytes."""
        with self._lock:
            segment = self._segments.setdefault(key, _Segment())
        with segment.lock:
            if segment.next_piece < 0:
                number = max((piece.last for piece in self._list_pieces(key)), default=-1) + 1
                segment.next_piece, segment.tail = number, _Tail(number)
            if segment.unconfirmed:
                content = self._resolve_unconfirmed(key, segment, content)
            while content:
                mark = secrets.token_hex(16)
                path = _piece_path(key, segment.next_piece)
                try:
                    self._objects.create(key, path, content, mark)
                except AlreadyExistsError:  # a restarted writer's, or one that lost its own
                    segment.next_piece += 1
                    segment.tail = _Tail(segment.next_piece)
                except Exception:
                    segment.unconfirmed, segment.unconfirmed_mark = content, mark
                    raise
                else:
                    self._note_stored(key, segment, content)
                    content = b""

    def delete(self, key: str) -> None:
        self._segments.pop(key, None)
        for path, _ in self._objects.list(key):
            self._objects.remove(path)

    def _resolve_unconfirmed(self, key: str, segment: _Segment, content: bytes) -> bytes:
        """Return what is left to append after an append that failed but may have arrived."""
        found = self._objects.head(_piece_path(key, segment.next_piece))
        if found is not None and found.writer == segment.unconfirmed_mark:
            content = content.removeprefix(segment.unconfirmed)
            self._note_stored(key, segment, segment.unconfirmed)
        segment.unconfirmed, segment.unconfirmed_mark = b"", ""
        return content

    def _note_stored(self, key: str, segment: _Segment, content: bytes) -> None:
        tail = segment.tail
        tail.content += content
        tail.paths.append(_piece_path(key, segment.next_piece))
        segment.next_piece += 1
        if len(tail.paths) < MERGED_PIECES:
            return
        with suppress(HoldfastError):  # the pieces are there; the next append tries it again
            path = f"{_piece_path(key, tail.first)}-{segment.next_piece - 1:010d}"
            self._objects.put(key, path, bytes(tail.content))
            merged = list(tail.paths)
            tail.paths.append(path)
            for each in merged:
                self._objects.remove(each)
            tail.paths = [path]
            if len(tail.content) >= MERGED_BYTES:
                segment.tail = _Tail(segment.next_piece)

    # --- reading ----------------------------------------------------------------------------
    def sizes(self, prefix: str) -> dict[str, int]:
        """Return the segments below a prefix, and their bytes, by one listing."""
        entries: dict[str, Entries] = {}
        for entry in self._objects.list(prefix.rpartition("/")[0]):
            if (match := _PIECE.fullmatch(entry[0])) and entry[0].startswith(prefix):
                entries.setdefault(match[1], []).append(entry)
        listed = {key: _joined(found) for key, found in entries.items()}
        # A listing in several answers may have met a merge: such a segment is listed alone.
        self._listed = {
            key: pieces if _is_complete(pieces) else self._list_pieces(key)
            for key, pieces in listed.items()
        }
        return {key: sum(p.size for p in self._listed[key]) for key in sorted(self._listed)}

    def size(self, key: str) -> int:
        return sum(piece.size for piece in self._require_pieces(key))

    def read(self, key: str) -> bytes:
        """Return the complete segment. Raises MissingKeyError."""
        return self._with_pieces(
            self._require_pieces(key),
            key,
            lambda found: b"".join(
                self._run_parallel(self._objects.read, [piece.path for piece in found])
            ),
        )

    def read_range(self, key: str, start: int, view: memoryview) -> None:
        """Fill `view` with the bytes from `start` on. Raises MissingKeyError, CorruptError."""
        stop = start + len(view)
        pieces = self._listed.get(key, [])
        if sum(piece.size for piece in pieces) < stop:
            pieces = self._require_pieces(key)
        self._with_pieces(pieces, key, lambda found: self._read_range(found, key, start, view))

    def _read_range(self, pieces: Sequence[_Piece], key: str, start: int, view: memoryview) -> None:
        stop = start + len(view)
        wanted: list[tuple[str, int, list[memoryview]]] = []
        at = 0
        for piece in pieces:
            low, high = max(start, at), min(stop, at + piece.size)
            if low < high:
                wanted.append((piece.path, low - at, [view[low - start : high - start]]))
            at += piece.size
        if at < stop:
            raise CorruptError(f"{key} ends at byte {at}, {stop} were expected")
        self._run_parallel(lambda each: self._objects.read_range(*each), wanted)

    def _with_pieces(self, pieces: list[_Piece], key: str, read: Callable[[list[_Piece]], R]) -> R:
        """Read from pieces; list them again if one has been merged meanwhile."""
        for _ in range(MAX_LISTINGS):
            try:
                return read(pieces)
            except MissingKeyError:
                self._listed.pop(key, None)
                pieces = self._require_pieces(key)
        return read(pieces)

    def _require_pieces(self, key: str) -> list[_Piece]:
        if not (found := self._list_pieces(key)):
            raise self._objects.missing_key_error(key)
        return found

    def _list_pieces(self, key: str) -> list[_Piece]:
        pieces: list[_Piece] = []
        for _ in range(MAX_LISTINGS):
            entries = self._objects.list(key)
            pieces = _joined(e for e in entries if (m := _PIECE.fullmatch(e[0])) and m[1] == key)
            if _is_complete(pieces):
                break
        return pieces


def segment_of(path: str) -> str | None:
    """Return the segment that an object is a piece of; None if it is none."""
    match = _PIECE.fullmatch(path)
    return match[1] if match else None


def _joined(entries: Iterable[tuple[str, int]]) -> list[_Piece]:
    """Return the pieces that make up a segment, in order, without those that a larger one has."""
    found = []
    for path, size in entries:
        if match := _PIECE.fullmatch(path):
            found.append(_Piece(int(match[2]), int(match[3] or match[2]), path, size))
    pieces: list[_Piece] = []
    for piece in sorted(found, key=lambda each: (each.first, -each.last)):
        if not pieces or piece.first > pieces[-1].last:
            pieces.append(piece)
    return pieces


def _is_complete(pieces: Sequence[_Piece]) -> bool:
    """Return True if no piece lacks."""
    firsts = [0, *(piece.last + 1 for piece in pieces)]
    return all(piece.first == first for piece, first in zip(pieces, firsts, strict=False))


def _piece_path(key: str, number: int) -> str:
    return f"{key}/.piece-{number:010d}"
