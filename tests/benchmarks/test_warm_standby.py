"""A standby that takes over compiles nothing again, and keeps the bits."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.ranks import ROOT


@pytest.mark.slow
def test_a_standby_has_compiled_before_it_is_needed() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.runtime.warm_standby"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("killed, standby")]
    first, standby, after = row.removeprefix("killed, standby").split()[:3]
    assert int(standby) >= int(first) > 0
    assert after == "0"
