"""The benchmarks of this room run, at a size that takes no time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.runtime.manifest import measure

from holdfast.config.sections.model import ModelConfig
from holdfast.layout import Layout
from tests.support.ranks import ROOT


def test_the_manifest_is_measured() -> None:
    model = ModelConfig(
        preset=None, layers=4, dim=16, heads=4, kv_heads=2, ffn_dim=24, vocab_size=64
    )
    found = measure(Layout(2, pp=2, dp_shard=3, tp=2, stages=(2, 2)), model, 4)
    assert found["ranks"] == 24
    assert found["stored_boxes_it_reads"] >= found["boxes_of_one_rank"] > 0  # type: ignore[operator]
    assert found["commit_object_bytes"] > 1000  # type: ignore[operator]


@pytest.mark.slow
def test_exports_are_measured(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.runtime.export",
        "--megabytes",
        "4",
        "--shard-megabytes",
        "2",
        "--folder",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[1:]] == ["hf", "dcp"]
    assert list(tmp_path.iterdir()) == []


# --- the benchmark of restores runs ---------------------------------------------------------------
@pytest.mark.slow
def test_every_source_and_layout_has_a_row_beside_its_floor() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.runtime.restore", "--quick"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    bars = [line for line in lines if " of at most " in line]
    rows = [line for line in lines if " onto " in line and line not in bars]
    assert len(rows) == 6
    assert len(bars) == 2 * len(rows) + 3
    assert all(line.endswith((": yes", ": NO")) for line in bars)
    assert bars[-1].startswith("killed process: ")
    for row in rows:
        read = float(row.partition("onto")[2].split()[5])
        assert 1.0 <= read <= 1.05, row
    assert any(line.startswith("killed worker") for line in lines)
