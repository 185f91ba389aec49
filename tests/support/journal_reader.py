"""A run's journal as it grows: what `holdfast.wire.journal.read_journal` gives, without its price.

A test that waits looks again and again. Reading it all each time takes a core from the run that
is waited for; here a look costs what was appended since the last.
"""

from __future__ import annotations

from pathlib import Path

from holdfast.core.data.lineage import DuplicateFilter
from holdfast.errors import CorruptError
from holdfast.events import Record
from holdfast.wire.journal import parse_segment
from holdfast.wire.store.run_store import JOURNAL_PREFIX, FolderStore, MissingKeyError, RunStore


class Journal:
    """The records of a run, which need not exist yet."""

    def __init__(self, folder: Path, store: RunStore | None = None) -> None:
        """store: of a run in a bucket."""
        self._folder, self._store = folder, store
        self._parsed: dict[str, tuple[int, list[Record]]] = {}  # segment -> (bytes, its records)
        self._records: list[Record] = []

    def records(self) -> list[Record]:
        """Every record, merged as `read` does."""
        if self._store is None and not (self._folder / "journal").is_dir():
            return []
        store = self._store or FolderStore(self._folder)
        keys = store.list(JOURNAL_PREFIX)
        gone = self._parsed.keys() - set(keys)
        for key in gone:
            del self._parsed[key]
        if sum([self._look(store, key) for key in keys]) or gone:
            everything = [record for _, found in self._parsed.values() for record in found]
            self._records = DuplicateFilter()(sorted(everything, key=lambda record: record.order))
        return list(self._records)

    def _look(self, store: RunStore, key: str) -> bool:
        """Return True if the segment has changed."""
        start, found = self._parsed.get(key, (0, []))
        try:
            size = store.size(key)
            if size == start:
                return False
            if size < start:  # another run's, at the same path
                start, found = 0, []
            data = bytearray(size - start)
            store.read_into(key, start, memoryview(data))
        except (MissingKeyError, CorruptError):
            return False  # cut after a failed append: it is looked at again
        segment = parse_segment(key, bytes(data))
        assert not segment.unreadable, segment.unreadable
        self._parsed[key] = (start + segment.complete_bytes, found + segment.records)
        return bool(segment.complete_bytes) or not start
