"""What the store of a run can do, and how fast: part of `holdfast doctor RUN`.

The probe makes a few objects below `probe/` and removes them, with the folders that it made. No
other key of the run is touched.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from holdfast.doctor.checks import Check
from holdfast.errors import HoldfastError, UserError
from holdfast.report.formatting import format_bytes, format_count, format_duration
from holdfast.wire.store.location import PROBE_PREFIX, UnfitStoreError, probe_store
from holdfast.wire.store.run_store import Buffer, FolderStore, RunStore

BLOB_BYTES = 16 << 20
"""Bytes of the object whose rate is measured: as many as one checksum of a checkpoint covers."""
APPENDS = 5
SLOW_APPEND_S = 0.5
"""A journal's line that takes longer makes each save wait."""


@dataclass
class TimedStore:
    """A run store that notes how long its calls take, in seconds by the call's name."""

    store: RunStore
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def create(self, key: str, data: Buffer | Iterable[Buffer]) -> None:
        begun = time.perf_counter()
        self.store.create(key, data)
        self._note("create", begun)

    def get(self, key: str) -> bytes:
        begun = time.perf_counter()
        found = self.store.get(key)
        self._note("get", begun)
        return found

    def list(self, prefix: str) -> list[str]:
        begun = time.perf_counter()
        found = self.store.list(prefix)
        self._note("list", begun)
        return found

    def append(self, key: str, data: Buffer, sync: bool = False) -> None:
        begun = time.perf_counter()
        self.store.append(key, data, sync)
        self._note("append", begun)

    def read_into(self, key: str, start: int, out: memoryview) -> None:
        self.store.read_into(key, start, out)

    def delete(self, key: str) -> None:
        self.store.delete(key)

    def size(self, key: str) -> int:
        return self.store.size(key)

    def sweep(self, prefix: str, keep: str = "") -> int:
        return self.store.sweep(prefix, keep)

    def median_s(self, call: str) -> float:
        return median(self.seconds.get(call) or [0.0])

    def _note(self, call: str, begun: float) -> None:
        self.seconds.setdefault(call, []).append(time.perf_counter() - begun)


@dataclass(frozen=True)
class StoreFindings:
    """The checks of a store, and its measured figures for `--json`."""

    checks: list[Check]
    figures: dict[str, float | int | bool]


def check_folder(folder: Path, next_checkpoint_bytes: int) -> StoreFindings:
    """Check a run folder. next_checkpoint_bytes: room that the next checkpoint needs."""
    room = _free_space(folder, next_checkpoint_bytes)
    try:
        findings = check_store(FolderStore(folder), str(folder), "run store")
        if not findings.figures:
            return StoreFindings([*findings.checks, room], {})
        links = _can_link(folder)
    finally:
        _remove_empty_folders(folder / PROBE_PREFIX)
    checks = [*findings.checks, _link_check(links, folder), room]
    return StoreFindings(checks, findings.figures | {"hard_links": links})


def check_store(store: RunStore, where: str, name: str) -> StoreFindings:
    """Check what a run rests on, and measure it. where: for messages. name: of the check."""
    timed = TimedStore(store)
    try:
        probe_store(timed, where)
        figures = _measure(timed)
    except UnfitStoreError as error:
        return StoreFindings([Check(name, "fails", error.message, error.remedy or "", where)], {})
    except UserError as error:
        remedy = error.remedy or "mend it, then call this again"
        return StoreFindings([Check(name, "fails", error.message, remedy, where)], {})
    except HoldfastError as error:
        return StoreFindings([Check(name, "fails", str(error), "", where)], {})
    does = "create-if-absent lets one of 16 writers win; a new object is listed at once"
    speed = (
        f"put {format_duration(figures['create_s'])}, get {format_duration(figures['get_s'])}, "
        f"list {format_duration(figures['list_s'])}; "
        f"{format_bytes(figures['write_bytes_per_s'])}/s written, "
        f"{format_bytes(figures['read_bytes_per_s'])}/s read ({format_bytes(BLOB_BYTES)})"
    )
    checks = [Check(name, "good", does, where=where), Check(f"{name} speed", "good", speed)]
    if "append_s" in figures:
        checks.append(_append_check(figures["append_s"], where))
    return StoreFindings(checks, dict(figures))


def _measure(timed: TimedStore) -> dict[str, float]:
    """Time a large object, and appends where the store has files."""
    prefix = f"{PROBE_PREFIX}{secrets.token_hex(8)}/"
    blob, line = f"{prefix}blob", f"{prefix}line"
    figures = {f"{call}_s": timed.median_s(call) for call in ("create", "get", "list")}
    try:
        begun = time.perf_counter()
        timed.create(blob, os.urandom(BLOB_BYTES))
        written = time.perf_counter()
        out = bytearray(BLOB_BYTES)
        timed.read_into(blob, 0, memoryview(out))
        read = time.perf_counter()
        figures["write_bytes_per_s"] = BLOB_BYTES / max(written - begun, 1e-9)
        figures["read_bytes_per_s"] = BLOB_BYTES / max(read - written, 1e-9)
        if isinstance(timed.store, FolderStore):
            for _ in range(APPENDS):
                timed.append(line, b"x" * 200, sync=True)
            figures["append_s"] = timed.median_s("append")
    finally:
        with suppress(HoldfastError):  # the error of the measurement counts
            timed.delete(blob)
            timed.delete(line)
    return figures


def _append_check(seconds: float, where: str) -> Check:
    found = f"{format_duration(seconds)} to append a line and sync it"
    if seconds > SLOW_APPEND_S:
        remedy = "saves wait for it; put the run folder on a faster disk with folder=<path>"
        return Check("run store sync", "weak", found, remedy, where)
    return Check("run store sync", "good", found)


def _can_link(folder: Path) -> bool:
    """Return True if the file system can make hard links."""
    place = folder / PROBE_PREFIX
    first = place / f".tmp-{secrets.token_hex(8)}"
    second = first.with_name(f"{first.name}-link")
    try:
        place.mkdir(exist_ok=True)
        first.write_bytes(b"x")
        os.link(first, second)
    except OSError:
        return False
    finally:
        for path in (first, second):
            path.unlink(missing_ok=True)
    return True


def _link_check(links: bool, folder: Path) -> Check:
    if links:
        return Check("hard links", "good", "the file system makes them")
    found = "the file system makes none; a rename that replaces nothing takes their place"
    return Check(
        "hard links", "weak", found, "it works; NFS and local disks have them", str(folder)
    )


def _free_space(folder: Path, needed: int) -> Check:
    """Free bytes and files, against one more checkpoint."""
    try:
        free, files = shutil.disk_usage(folder).free, os.statvfs(folder)
    except OSError as error:
        return Check("free space", "fails", f"not known ({error.strerror})", where=str(folder))
    found = f"{format_bytes(free)} free"
    if needed:
        found += f"; the next checkpoint takes {format_bytes(needed)}"
    if files.f_files and files.f_favail < 100:
        left = f"{found}, but room for {format_count(files.f_favail)} more files"
        return Check("free space", "fails", left, "remove files on this disk", str(folder))
    if free < needed:
        remedy = f"make room: holdfast checkpoint prune {folder}, or use another disk"
        return Check("free space", "fails", found, remedy, str(folder))
    if free < 2 * needed:
        remedy = "an old checkpoint is removed only after the next one is complete: make room"
        return Check("free space", "weak", found, remedy, str(folder))
    return Check("free space", "good", found)


def _remove_empty_folders(root: Path) -> None:
    """Remove the folders that the probe made; one that has files in it stays."""
    for folder, _, _ in os.walk(root, topdown=False):
        with suppress(OSError):
            os.rmdir(folder)
