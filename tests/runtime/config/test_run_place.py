"""The local folder and the dataset of a run in a bucket."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.config.loading.load import load_config
from holdfast.config.sections.run_place import local_run_folder


def test_a_run_in_a_bucket_has_its_dataset_below_it() -> None:
    place = "folder=s3://b/runs/{name}/?endpoint=https://h&region=x"
    assert load_config(None, [place]).config.data.folder == (
        "s3://b/runs/run/dataset?endpoint=https://h&region=x"
    )
    for other in ("mine", "s3://c/mine"):
        assert load_config(None, [place, f"data.folder={other}"]).config.data.folder == other
    assert load_config(None, ["folder=runs/mine"]).config.data.folder == "datasets/python-stdlib"
    # No dataset lies open in a bucket whose checkpoints are sealed.
    sealed = load_config(None, ["folder=s3://b/run?seal=env"])
    assert sealed.config.data.folder == "datasets/python-stdlib"


def test_one_bucket_is_one_local_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = local_run_folder("s3://b/runs/mine?endpoint=https://h&region=x")
    assert first.startswith(f"{tmp_path}/holdfast/runs/mine-")
    assert local_run_folder("s3://b/runs/mine/?timeout=9&endpoint=https://h") == first
    others = ("s3://b/runs/mine", "s3://c/runs/mine?endpoint=https://h", "gs://b/runs/mine")
    assert len({first, *map(local_run_folder, others)}) == 4
