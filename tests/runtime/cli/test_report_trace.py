"""`layout.trace_step` and `holdfast report --trace`: what each worker did when, for a viewer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.commands import apart, here, write_run_file


@pytest.mark.slow
def test_a_step_of_a_run_is_written_for_a_viewer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file = write_run_file(tmp_path)
    settings = ("model.layers=2", "layout.pp=2", "train.steps=4", "layout.workers=4")
    trained = apart("train", run_file, *settings, "layout.trace_step=3", deadline=240)
    assert trained.code == 0, trained.err
    path = tmp_path / "trace.json"
    written = apart("report", tmp_path / "run", "--trace", path)
    assert written.code == 0, written.err
    assert "step 3, 4 workers" in written.err
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    for rank in range(4):
        names = {(e["cat"], e["name"]) for e in events if e["pid"] == rank}
        stage = rank % 2
        assert {("compute", f"{stage}F0"), ("compute", f"{stage}B1")} <= names
        assert ("reduce", "bucket 0") in names
    folder, missing = tmp_path / "run", tmp_path / "none" / "trace.json"
    here(capsys, "report", folder, "--trace", tmp_path).refuses(
        f"{tmp_path}: the trace cannot be written: this is a folder"
    )
    here(capsys, "report", folder, "--trace", missing).refuses(
        f"{missing}: the trace cannot be written (No such file or directory)"
    )
    assert not missing.parent.exists()


@pytest.mark.parametrize("options", [["--json"], ["--output", "a.html"], ["--sample", "a"]])
def test_a_trace_is_written_alone(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = here(capsys, "report", tmp_path, "--trace", tmp_path / "trace.json", *options)
    found.refuses(f"{options[0]} has no effect with --trace; leave one of the two out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_run_without_a_traced_step_says_how_to_get_one(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path)
    assert apart("train", run_file, "train.steps=2", "layout.workers=1", deadline=240).code == 0
    asked = apart("report", tmp_path / "run", "--trace", tmp_path / "trace.json")
    asked.refuses("no step of this run was traced", "layout.trace_step")
    assert not (tmp_path / "trace.json").exists()
