"""A real disk of a few megabytes: a tmpfs in a namespace of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path


def has_namespaces() -> bool:
    """Return True if a process may mount a tmpfs here."""
    if shutil.which("unshare") is None:
        return False
    probe = ["unshare", "-Urm", "sh", "-c", "mount -t tmpfs none /tmp"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


def run_on_small_disk(folder: Path, size: str, *arguments: str, timeout_s: float = 300) -> str:
    """Run Python with these arguments and a disk of `size` mounted on `folder`; return its
    output."""
    mount = f'mount -t tmpfs -o size={size} none "$0" && exec "$@"'
    done = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", mount, str(folder), sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
