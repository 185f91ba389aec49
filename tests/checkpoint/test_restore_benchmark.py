"""The benchmark of restores runs: every case ends with a row, and reads little beside its boxes."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.ranks import ROOT


def test_every_source_and_layout_has_a_row_beside_its_floor() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.restore", "--quick"],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if " onto " in line]
    assert len(rows) == 6
    for row in rows:
        read = float(row.partition("onto")[2].split()[5])
        assert 1.0 <= read <= 1.05, row
    assert any(line.startswith("killed worker") for line in done.stdout.splitlines())
