"""The example of a model of one's own, as a script that calls `holdfast.train`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "examples" / "own_model"


def test_the_script_trains_and_reads_its_checkpoint(tmp_path: Path) -> None:
    for name in ("spirals.py", "run.yaml"):
        shutil.copy(FOLDER / name, tmp_path / name)
    done = subprocess.run(
        [sys.executable, "spirals.py"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("step 300: "), done.stdout
    assert int(last.split()[2].rstrip("%")) > 90
