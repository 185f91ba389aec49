"""`make gpu` on a machine without an accelerator: it runs, and a row that fails stops no other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.gpu import NAMES, ROWS, Row, in_groups, run_row

from tests.support.ranks import ROOT


def quick(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--quick"]
    return subprocess.run(
        [*command, "--out", str(out), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def test_a_row_writes_its_figures_into_the_file(tmp_path: Path) -> None:
    done = quick(tmp_path / "gpu.json", "--only", "parity")
    assert done.returncode == 0, done.stdout + done.stderr
    stored = json.loads((tmp_path / "gpu.json").read_text())
    (row,) = stored["rows"]
    assert (row["row"], row["passed"]) == ("parity", True)
    assert row["figures"]["adamw"]["worst_loss"] == 0.0
    assert "parity" in done.stdout


@pytest.mark.slow
def test_every_row_that_a_cpu_has_passes(tmp_path: Path) -> None:
    done = quick(tmp_path / "gpu.json")
    assert done.returncode == 0, done.stdout + done.stderr
    stored = json.loads((tmp_path / "gpu.json").read_text())
    assert [row["row"] for row in stored["rows"]] == [row.name for row in ROWS if row.on_cpu]


def test_a_row_that_fails_says_its_error_in_one_line(tmp_path: Path) -> None:
    told = run_row(Row("no such row", "floors:floors", 60), "cpu", True, tmp_path)
    assert not told["passed"]
    assert told["line"].startswith("failed: ")
    assert "\n" not in told["line"]
    assert "no such row" in told["error"]


def test_nothing_runs_beside_a_row_that_is_timed() -> None:
    groups = [[row.name for row in group] for group in in_groups(ROWS)]
    assert [name for group in groups for name in group] == list(NAMES)
    timed = {"floors", "capture", "train-1b", *(name for name in NAMES if name.startswith("1b-"))}
    assert all(len(group) == 1 for group in groups if timed & set(group))
    assert max(map(len, groups)) > 1
