"""A disk that is full during the saves of a complete run, for real: a size-limited tmpfs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.checkpoint.save.test_writer_full_disk import namespaces

MOUNT = 'mount -t tmpfs -o size=12m none "$0" && exec "$@"'


@pytest.mark.slow
@pytest.mark.skipif(not namespaces(), reason="no user and mount namespaces here")
def test_training_goes_on_through_a_full_disk_and_saving_resumes(tmp_path: Path) -> None:
    """One sentence, events, every step in sight, and a ledger without a hole afterwards."""
    seen = _trained_on_full_disk(tmp_path)
    assert seen["skipped"]
    assert seen["lost"] == 0


def _trained_on_full_disk(folder: Path) -> dict[str, Any]:
    done = subprocess.run(
        [
            "unshare",
            "-Urm",
            "sh",
            "-c",
            MOUNT,
            str(folder),
            sys.executable,
            "-m",
            "tests.support.train_on_full_disk",
            str(folder),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout)
    assert seen["code"] == 0, seen
    assert "the journal cannot be written, its records are kept" in seen["said"]
    assert "the disk is full; free some space" in seen["said"]
    assert "Traceback" not in seen["said"]
    assert (seen["left"], seen["verify"]) == ([], 0)
    code, text = seen["audit"]
    assert code == 0, text
    assert "none missing, none twice" in text
    return seen
