"""The one journal: typed events, a segment per writer and generation, merged in order.

A segment is `journal/<generation>/<writer>.jsonl`, one record a line. One process appends to it. A
line is complete or (after a power loss, at the very end) torn; a torn last line never happened.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator

from holdfast.core.data.lineage import DuplicateFilter
from holdfast.core.json_parsing import parse_json
from holdfast.errors import CorruptError
from holdfast.events import Event, Record, from_json, to_json
from holdfast.wire.store.run_store import JOURNAL_PREFIX, MissingKeyError, RunStore


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
            self._store.append(self._key, b"".join(lines), sync=sync)
            with self._lock:
                del self._pending[: len(lines)]
            self._unsynced = not sync


def read_journal(store: RunStore) -> list[Record]:
    """Every record of the run, merged by (generation, step, writer, sequence).

    Repeated reports of a step (`core.data.lineage.DuplicateFilter`), kinds that this version does
    not know and a torn last line are left out. Raises CorruptError for a line of any other kind,
    naming segment and line.
    """
    records: list[Record] = []
    for key in store.list(JOURNAL_PREFIX):
        records += parse_segment(key, store.get(key))[0]
    return DuplicateFilter()(sorted(records, key=lambda record: record.order))


def parse_segment(key: str, data: bytes, first_line: int = 1) -> tuple[list[Record], int]:
    """Return (the records of the complete lines in `data`, bytes of those lines)."""
    end = data.rfind(b"\n") + 1
    records: list[Record] = []
    lines = data[:end].splitlines()
    for number, line in enumerate(lines, first_line):
        try:
            record = from_json(parse_json(line)) if line else None
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, json.JSONDecodeError) and _is_torn(line):
                continue
            raise CorruptError(f"{key}, line {number}: not a record of the journal") from error
        if record is not None:
            records.append(record)
    return records, end


class JournalTail:
    """Reads what was appended to a journal since the last look."""

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self._read_bytes: dict[str, int] = {}  # segment -> bytes of the complete lines read
        self._duplicates = DuplicateFilter()

    def read_new(self) -> list[Record]:
        """Records that appeared since the last call, in order among themselves."""
        records: list[Record] = []
        for key in self._store.list(JOURNAL_PREFIX):
            start = self._read_bytes.get(key, 0)
            try:
                size = self._store.size(key)
                if size <= start:
                    continue
                data = bytearray(size - start)
                self._store.read_into(key, start, memoryview(data))
            except (MissingKeyError, CorruptError):
                continue  # removed, or cut after a failed append: looked at again next time
            found, whole = parse_segment(key, bytes(data))
            records += found
            self._read_bytes[key] = start + whole
        return self._duplicates(sorted(records, key=lambda record: record.order))


def follow_journal(
    store: RunStore, *, poll_interval_s: float = 0.25, stop: threading.Event | None = None
) -> Iterator[list[Record]]:
    """Batches of new records, one every `poll_interval_s` seconds, empty ones too (a view wants to
    tick).

    Ends when `stop` is set; without one, when the consumer leaves.
    """
    follower = JournalTail(store)
    ended = stop or threading.Event()
    while True:
        yield follower.read_new()
        if ended.wait(poll_interval_s):
            return


def _segment_end(store: RunStore, key: str) -> tuple[int, bool]:
    """(next sequence number, whether the segment ends inside a line)."""
    try:
        data = store.get(key)
    except MissingKeyError:
        return 0, False
    records, _ = parse_segment(key, data)
    last = max((record.sequence for record in records), default=-1)
    # A segment may hold kinds we do not know: count lines too, so that no number repeats.
    return max(last + 1, data.count(b"\n")), not data.endswith(b"\n") and bool(data)


def _is_torn(line: bytes) -> bool:
    """Return True if a power loss tore this line and the next writer closed it: the beginning of a
    record without its end."""
    return line.startswith(b'{"v":') and not line.endswith(b"}}")
