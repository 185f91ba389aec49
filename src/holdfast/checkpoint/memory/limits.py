"""The memory that an arena may take.

No file system bounds memory files. Allocating more than there is does not fail: it wakes the
kernel's OOM killer, which may well kill a worker. So the room is looked up first.
"""

from __future__ import annotations

from pathlib import Path


def available_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that can be allocated now: of the machine, or of this process's memory cgroup (both
    versions) if that is less. None where the kernel does not say."""
    found = [_machine_bytes(root / "proc/meminfo"), *_cgroup_bytes(root)]
    return min((value for value in found if value is not None), default=None)


def _machine_bytes(path: Path) -> int | None:
    for line in _read_or_empty(path).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_bytes(root: Path) -> list[int | None]:
    """What the own cgroup and each one above it leaves."""
    left: list[int | None] = []
    for line in _read_or_empty(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, usage = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        folder = base / path.lstrip("/")
        for level in (folder, *folder.parents):
            left.append(_remaining_bytes(level / limit, level / usage))
            if level == base:
                break
    return left


def _remaining_bytes(limit: Path, usage: Path) -> int | None:
    """Page cache counts as used here though it could go: the answer errs on the safe side."""
    maximum, used = _read_or_empty(limit).strip(), _read_or_empty(usage).strip()
    if not maximum.isdecimal() or not used.isdecimal():
        return None  # "max", or no such controller
    return max(0, int(maximum) - int(used))


def _read_or_empty(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
