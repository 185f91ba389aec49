"""A full disk during a save, for real: a size-limited tmpfs in a namespace of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

MOUNT = 'mount -t tmpfs -o size=2560k none "$0" && exec "$@"'


def namespaces() -> bool:
    if shutil.which("unshare") is None:
        return False
    probe = ["unshare", "-Urm", "sh", "-c", "mount -t tmpfs none /tmp"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not namespaces(), reason="no user and mount namespaces here")
def test_a_full_disk_fails_the_save_and_nothing_else(tmp_path: Path) -> None:
    """Probe P2: no commit, nothing left behind, the old checkpoint intact, saving resumes."""
    done = subprocess.run(
        [
            "unshare",
            "-Urm",
            "sh",
            "-c",
            MOUNT,
            str(tmp_path),
            sys.executable,
            "-m",
            "tests.support.save_on_full_disk",
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    for step in (2, 3):
        assert "the disk is full" in report[f"reason{step}"]
        assert report[f"left{step}"] == []
    assert report["failed"] == [2, 3]
