"""A worker's log that cannot be opened costs no worker."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CODE = """
import sys
from holdfast.elastic.worker.output import redirect_output
for log in sys.argv[1:]:
    redirect_output(log)
    print("after", log)
"""


def test_output_stays_where_it_is_until_a_log_can_be_opened(tmp_path: Path) -> None:
    away, there = tmp_path / "away" / "rank0.log", tmp_path / "rank0.log"
    done = subprocess.run(
        [sys.executable, "-c", CODE, away, there], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith(f"what belongs into {away} follows here: ")
    assert second == f"after {away}"
    assert there.read_text() == f"after {there}\n"
