"""A disk that is full during the saves of a complete run, for real: a size-limited tmpfs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.small_disk import has_namespaces, run_on_small_disk


@pytest.mark.slow
@pytest.mark.skipif(not has_namespaces(), reason="no user and mount namespaces here")
def test_training_goes_on_through_a_full_disk_and_saving_resumes(tmp_path: Path) -> None:
    """One sentence, events, every step in sight, and a ledger without a hole afterwards."""
    seen = _trained_on_full_disk(tmp_path)
    assert seen["skipped"]
    assert seen["lost"] == 0


def _trained_on_full_disk(folder: Path) -> dict[str, Any]:
    module = "tests.support.train_on_full_disk"
    seen: dict[str, Any] = json.loads(run_on_small_disk(folder, "12m", "-m", module, str(folder)))
    assert seen["code"] == 0, seen
    assert "the journal cannot be written, its records are kept" in seen["said"]
    assert "the disk is full; free some space" in seen["said"]
    assert "Traceback" not in seen["said"]
    assert (seen["left"], seen["verify"]) == ([], 0)
    code, text = seen["audit"]
    assert code == 0, text
    assert "none missing, none twice" in text
    return seen
