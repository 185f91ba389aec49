"""`holdfast chaos` with the run store in a bucket: the same verdicts as in a folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import s3
from tests.support.commands import apart


@pytest.mark.slow
@pytest.mark.usefixtures("s3_credentials")
def test_a_broken_run_in_a_bucket_comes_to_the_same_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    store = s3.location(s3.server())
    faults = "4 kill,agent,coordinator,everything"
    apart(
        *("chaos", "--faults", faults, "--layout", "two", "--out", tmp_path / "out"),
        *("--store", store),
        deadline=600,
    ).succeeds()
    (result,) = json.loads((tmp_path / "out" / "result.json").read_text())["runs"]
    assert result["recovered"], result
    assert not result["tracebacks"]
    assert not (tmp_path / "out" / "runs" / result["run"] / "run.d" / "terms").exists()
    refused = apart("chaos", "--faults", "rotten-disk", "--store", store, "--out", tmp_path / "o")
    refused.refuses("the run store is a bucket")
