"""Ten thousand attempts at the listeners of a run, where the test command makes a sample.

python -m pytest -m slow tests/test_strangers_many.py
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.ranks import ROOT


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["1"])
def test_ten_thousand_attempts(seed: str) -> None:
    """So many at the agent's control, and half as many at each of the others."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "tests/test_strangers.py",
         "tests/test_strangers_between_agents.py"],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "HOLDFAST_STRANGERS": "10000", "HOLDFAST_STRANGERS_SEED": seed},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]
