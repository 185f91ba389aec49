"""The benchmark of restores runs: every case ends with a row, and reads little beside its boxes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.ranks import ROOT


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
