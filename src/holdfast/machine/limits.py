"""The cores and the memory that this process may use, and the memory that it can still allocate.

Each is the machine's figure, or the tightest limit of the process's control groups if that is
lower. In a container on a large host, other sources give the host's figure. Groups are nested: a
limit also counts for all groups below. Versions 1 and 2 differ in their files' names, and a machine
may use both.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

_ROOT = Path("/")
_BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")


def usable_cores() -> int:
    """At least 1; a quota of 1.5 cores counts as 2, since threads beyond it only wait."""
    try:
        allowed = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        allowed = os.cpu_count() or 1
    return max(1, min([allowed, *map(math.ceil, _core_quotas())]))


def shared_cores_id() -> str:
    """Return a text that processes have in common if and only if they share the same cores.

    "" for a process whose cores are its own, or on a system that does not say."""
    try:
        allowed = sorted(os.sched_getaffinity(0))
        boot = _BOOT_ID_FILE.read_text("ascii").strip()
    except (AttributeError, OSError, ValueError):
        return ""
    if usable_cores() < len(allowed):  # a container's quota
        return ""
    return f"{boot}:{','.join(map(str, allowed))}"


def usable_memory() -> int:
    """Bytes of memory."""
    return min([psutil.virtual_memory().total, *(limit for limit, _ in _memory_limits())])


def available_memory() -> int:
    """Bytes that can be allocated now.

    No file system bounds memory files. Allocating more than there is does not fail: it wakes the
    kernel's OOM killer, which may well kill a worker. So an arena's owner looks here first.
    """
    left = (max(0, limit - used) for limit, used in _memory_limits())
    return min([psutil.virtual_memory().available, *left])


def _core_quotas() -> Iterator[float]:
    for group in _control_groups("cpu"):
        words = _read_words(group / "cpu.max") or [
            *_read_words(group / "cpu.cfs_quota_us"),
            *_read_words(group / "cpu.cfs_period_us"),
        ]
        if len(words) == 2 and words[0].isdecimal():  # no quota: "max", or -1 in version 1
            yield int(words[0]) / int(words[1])


def _memory_limits() -> Iterator[tuple[int, int]]:
    """Yield the limit of each group that has one, and the bytes of it that are in use.

    Page cache of files is not in use: before a group runs out, the kernel takes it back. (The
    machine's figure treats it alike.) Memory files lie in the page cache too, and stay.
    """
    for group in _control_groups("memory"):
        limit = _read_bytes(group, "memory.max", "memory.limit_in_bytes")
        if limit is None:
            continue
        words = _read_words(group / "memory.stat")
        stat = dict(zip(words[::2], map(int, words[1::2]), strict=True))
        # In version 1 the plain figures leave out the groups below.
        cache = sum(
            stat.get(f"total_{kind}", stat.get(kind, 0))
            for kind in ("inactive_file", "active_file")
        )
        usage = _read_bytes(group, "memory.current", "memory.usage_in_bytes")
        yield limit, max(0, (usage or 0) - cache)


def _control_groups(controller: str) -> Iterator[Path]:
    """Yield the folder of this process's group, and of each group above it. Not all of them need be
    there: a container may see its own group as the topmost one."""
    for line in _read(_ROOT / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        top = _ROOT / "sys/fs/cgroup"
        if controllers:  # version 1 has a tree for each controller
            top /= controller
            if controller not in controllers.split(","):
                continue
        group = top / path.lstrip("/")
        yield group
        while group != top:
            group = group.parent
            yield group


def _read_bytes(group: Path, *names: str) -> int | None:
    """Return the number in the first of these files that has one; None for no limit."""
    texts = (_read(group / name).strip() for name in names)
    return next((int(text) for text in texts if text.isdecimal()), None)


def _read_words(path: Path) -> list[str]:
    return _read(path).split()


def _read(path: Path) -> str:
    """Return a file's text; "" where the system has no such file."""
    try:
        return path.read_text()
    except OSError:
        return ""
