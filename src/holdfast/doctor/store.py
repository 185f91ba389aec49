"""What the store of a run can do, and how fast: part of `holdfast doctor RUN`.

The probe makes a few objects below `probe/` and removes them, with the folders that it made. No
other key of the run is touched.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from holdfast.doctor.checks import Check, failed_check
from holdfast.errors import HoldfastError, UserError
from holdfast.report.formatting import format_bytes, format_count, format_duration
from holdfast.wire.store.folder_seal import read_seal
from holdfast.wire.store.location import PROBE_PREFIX, open_store, probe_store
from holdfast.wire.store.run_store import FolderStore, RunStore

BLOB_BYTES = 16 << 20
"""Bytes of the object whose rate is measured: as many as one checksum of a checkpoint covers."""
APPENDS = 5
SMALL_OBJECTS = 3  # Objects whose creation, reading and listing are timed
SLOW_APPEND_S = 0.5  # A journal's line that takes longer makes each save wait


@dataclass(frozen=True)
class StoreFindings:
    """The checks of a store, and its measured figures for `--json`."""

    checks: list[Check]
    figures: dict[str, float | int | bool]


def check_folder(folder: Path, next_checkpoint_bytes: int) -> StoreFindings:
    """Check a run folder. next_checkpoint_bytes: room that the next checkpoint needs."""
    room = _free_space(folder, next_checkpoint_bytes)
    try:
        findings, sealed = check_store(FolderStore(folder), str(folder), "run store"), _seal(folder)
        if not findings.figures:
            return StoreFindings([*findings.checks, sealed, room], {})
        links = _can_link(folder)
    finally:
        root = folder / PROBE_PREFIX
        for empty, _, _ in os.walk(root, topdown=False):
            with suppress(OSError):
                os.rmdir(empty)
    checks = [*findings.checks, sealed, _link_check(links, folder), room]
    return StoreFindings(checks, findings.figures | {"hard_links": links})


def _seal(folder: Path) -> Check:
    """Say whether the folder's checkpoints are sealed, and whether their key is here."""
    try:
        is_sealed = read_seal(folder) is not None
        open_store(folder)
    except HoldfastError as error:
        return failed_check("seal", error, str(folder), "")
    if is_sealed:
        return Check("seal", "good", "the checkpoints are sealed, and their key is here")
    return Check("seal", "good", "the checkpoints are not sealed (checkpoint.seal seals a new run)")


def check_store(store: RunStore, where: str, name: str) -> StoreFindings:
    """Check what a run rests on, and measure it. where: for messages. name: of the check."""
    try:
        probe_store(store, where)
        figures = _measure(store)
    except HoldfastError as error:
        remedy = "mend it, then call this again" if isinstance(error, UserError) else ""
        return StoreFindings([failed_check(name, error, where, remedy)], {})
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


def _measure(store: RunStore) -> dict[str, float]:
    """Time small objects and a large one, and appends where the store has files."""
    prefix = f"{PROBE_PREFIX}{secrets.token_hex(8)}/"
    blob, line = f"{prefix}blob", f"{prefix}line"
    small = [f"{prefix}small-{number}" for number in range(SMALL_OBJECTS)]
    try:
        figures = {
            "create_s": _median_s(small, lambda key: store.create(key, b"x")),
            "get_s": _median_s(small, store.get),
            "list_s": _median_s(small, lambda key: store.list(prefix)),
        }
        written = _median_s([blob], lambda key: store.create(key, os.urandom(BLOB_BYTES)))
        out = memoryview(bytearray(BLOB_BYTES))
        read = _median_s([blob], lambda key: store.read_into(key, 0, out))
        figures["write_bytes_per_s"] = BLOB_BYTES / max(written, 1e-9)
        figures["read_bytes_per_s"] = BLOB_BYTES / max(read, 1e-9)
        if isinstance(store, FolderStore):
            lines = [line] * APPENDS
            figures["append_s"] = _median_s(lines, lambda key: store.append(key, b"x" * 200, True))
    finally:
        with suppress(HoldfastError):  # the error of the measurement counts
            for key in (*small, blob, line):
                store.delete(key)
    return figures


def _median_s(keys: Sequence[str], call: Callable[[str], object]) -> float:
    """Seconds of a call: the median of one for each key."""
    seconds = []
    for key in keys:
        begun = time.perf_counter()
        call(key)
        seconds.append(time.perf_counter() - begun)
    return median(seconds)


def _append_check(seconds: float, where: str) -> Check:
    found = f"{format_duration(seconds)} to append a line and sync it"
    if seconds > SLOW_APPEND_S:
        remedy = "saves wait for it; put the run folder on a faster disk with folder=<path>"
        return Check("run store sync", "weak", found, remedy, where)
    return Check("run store sync", "good", found)


def _can_link(folder: Path) -> bool:
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
