"""The one journal: typed events, a segment per writer and generation, merged in order.

A segment is `journal/<generation>/<writer>.jsonl`, one record a line. One process appends to it. A
line is complete or (after a power loss, at the very end) torn; a torn last line never happened. Any
other line that is not a record is left out, and named to the reader.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from holdfast.core.data.lineage import DuplicateFilter
from holdfast.core.json_parsing import parse_json
from holdfast.errors import CorruptError
from holdfast.events import Event, Record, from_json, to_json
from holdfast.wire.store.run_store import (
    JOURNAL_PREFIX,
    MissingKeyError,
    RunStore,
    append_interval,
    segment_sizes,
)


def segment_key(generation: int, writer: str) -> str:
    return f"{JOURNAL_PREFIX}{generation:010d}/{writer}.jsonl"


class JournalWriter:
    """Appends one writer's events of one generation.

    `emit` only makes the record; `flush` stores what was emitted. A flush that fails (a full
    disk) keeps its lines, so a later one writes them all, in order.
    """

    def __init__(
        self,
        store: RunStore,
        writer: str,
        generation: int,
        clock: Callable[[], float] = time.time,
        *,
        is_new_generation: bool = False,
    ) -> None:
        """`is_new_generation`: the caller has just opened this generation, so nothing of it can be
        stored yet, and the store need not be asked."""
        self.writer = writer
        self.generation = generation
        self._store = store
        self._clock = clock
        self._key = segment_key(generation, writer)
        self._lock = threading.Lock()  # of what is pending; never held while the store works
        self._flush_lock = threading.Lock()
        self._sequence, torn = (0, False) if is_new_generation else _segment_end(store, self._key)
        # A torn line is closed, so that the next record begins a line of its own.
        self._pending: list[bytes] = [b"\n"] if torn else []
        self._unsynced = False
        self._appended_at = float("-inf")

    def is_due(self, interval_s: float) -> bool:
        """Return True if the last append began at least so many seconds ago."""
        return time.monotonic() - self._appended_at >= interval_s

    @property
    def has_pending(self) -> bool:
        """True if an emitted record is not stored yet."""
        return bool(self._pending)

    def emit(self, event: Event) -> Record:
        """The event's record: numbered, stamped with this writer's clock, waiting for a flush."""
        with self._lock:
            record = Record(
                self.generation, self.writer, self._sequence, round(self._clock(), 6), event
            )
            self._sequence += 1
            line = json.dumps(to_json(record), separators=(",", ":"), allow_nan=True)
            self._pending.append(line.encode() + b"\n")
        return record

    def flush(self, sync: bool = False) -> None:
        """Append what waits; with `sync`, durable on return, with all that came before it.

        Raises what the run store raises (OutOfSpaceError, RunFolderError); nothing is lost then.
        """
        with self._flush_lock:
            with self._lock:
                lines = list(self._pending)
            if not lines and not (sync and self._unsynced):
                return
            self._appended_at = time.monotonic()
            self._store.append(self._key, b"".join(lines), sync=sync)
            with self._lock:
                del self._pending[: len(lines)]
            self._unsynced = not sync


@dataclass(frozen=True)
class JournalContents:
    """What a journal holds.

    records: merged by (generation, step, writer, sequence), without repeated reports of a step
        (`core.data.lineage.DuplicateFilter`) and kinds that this version does not know.
    unreadable: the places of lines that are not records, as "SEGMENT, line N".
    """

    records: list[Record]
    unreadable: tuple[str, ...] = ()

    def unreadable_sentence(self) -> str:
        """Return what cannot be read of the journal; "" if all of it can."""
        if not self.unreadable:
            return ""
        lines = "one line" if len(self.unreadable) == 1 else f"{len(self.unreadable)} lines"
        return (
            f"{lines} of the journal cannot be read, so what they held is not known; the first: "
            f"{self.unreadable[0]}"
        )


@dataclass(frozen=True)
class ParsedSegment:
    """The records of the complete lines of a segment, the bytes of those lines, and the places of
    lines that are not records."""

    records: list[Record]
    complete_bytes: int
    unreadable: tuple[str, ...]


def read_contents(store: RunStore) -> JournalContents:
    """Read every record of the run, and note the lines that are none."""
    records: list[Record] = []
    unreadable: list[str] = []
    for key, size in segment_sizes(store, JOURNAL_PREFIX).items():
        segment = parse_segment(key, _read(store, key, size))
        records += segment.records
        unreadable += segment.unreadable
    merged = DuplicateFilter()(sorted(records, key=lambda record: record.order))
    return JournalContents(merged, tuple(unreadable))


def read_journal(store: RunStore) -> list[Record]:
    """Return the records of `read_contents`."""
    return read_contents(store).records


def parse_segment(key: str, data: bytes) -> ParsedSegment:
    """Parse the complete lines of a segment."""
    end = data.rfind(b"\n") + 1
    records: list[Record] = []
    unreadable: list[str] = []
    for number, line in enumerate(data[:end].split(b"\n"), 1):
        try:
            record = from_json(parse_json(line)) if line else None
        except (ValueError, KeyError, TypeError) as error:
            if not (isinstance(error, json.JSONDecodeError) and _is_torn(line)):
                unreadable.append(f"{key}, line {number}")
            continue
        if record is not None:
            records.append(record)
    return ParsedSegment(records, end, tuple(unreadable))


class JournalTail:
    """Reads what was appended to a journal since the last look."""

    def __init__(self, store: RunStore, positions: Mapping[str, int] | None = None) -> None:
        """positions: `positions` of an earlier reader, to continue where it stopped."""
        self._store = store
        # segment -> bytes of the complete lines read
        self._read_bytes: dict[str, int] = dict(positions or {})
        self._duplicates = DuplicateFilter()

    @property
    def positions(self) -> dict[str, int]:
        """Return how far each segment was read, in bytes."""
        return dict(self._read_bytes)

    def read_new(self) -> list[Record]:
        """Records that appeared since the last call, in order among themselves.

        Raises what the run store raises. The next call then returns these records too."""
        records: list[Record] = []
        read_bytes: dict[str, int] = {}
        for key, size in segment_sizes(self._store, JOURNAL_PREFIX).items():
            start = self._read_bytes.get(key, 0)
            try:
                if size <= start:
                    continue
                data = bytearray(size - start)
                self._store.read_into(key, start, memoryview(data))
            except (MissingKeyError, CorruptError):
                continue  # removed, or cut after a failed append: looked at again next time
            segment = parse_segment(key, bytes(data))
            records += segment.records
            read_bytes[key] = start + segment.complete_bytes
        self._read_bytes |= read_bytes
        return self._duplicates(sorted(records, key=lambda record: record.order))


def follow_journal(
    store: RunStore, *, poll_interval_s: float = 0.25, stop: threading.Event | None = None
) -> Iterator[list[Record]]:
    """Batches of new records, one every `poll_interval_s` seconds, empty ones too (a view wants to
    tick).

    Ends when `stop` is set; without one, when the consumer leaves.
    """
    follower = JournalTail(store)
    poll_interval_s = max(poll_interval_s, append_interval(store))
    ended = stop or threading.Event()
    while True:
        yield follower.read_new()
        if ended.wait(poll_interval_s):
            return


def _read(store: RunStore, key: str, size: int) -> bytes:
    data = bytearray(size)
    try:
        store.read_into(key, 0, memoryview(data))
    except CorruptError:  # cut after a failed append
        return store.get(key)
    return bytes(data)


def _segment_end(store: RunStore, key: str) -> tuple[int, bool]:
    """(next sequence number, whether the segment ends inside a line)."""
    try:
        data = store.get(key)
    except MissingKeyError:
        return 0, False
    last = max((record.sequence for record in parse_segment(key, data).records), default=-1)
    # A segment may hold kinds we do not know: count lines too, so that no number repeats.
    return max(last + 1, data.count(b"\n")), not data.endswith(b"\n") and bool(data)


def _is_torn(line: bytes) -> bool:
    """Return True if a power loss tore this line and the next writer closed it: the beginning of a
    record without its end."""
    return line.startswith(b'{"v":') and not line.endswith(b"}}")
