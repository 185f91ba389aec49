"""Ten thousand attempts at the listeners of a run, where the test command makes a sample.

python -m pytest -m slow tests/system/test_unauthorized_requests_many.py
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.ranks import ROOT


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["1"])
def test_ten_thousand_attempts(seed: str) -> None:
    """Ten thousand at the agent's control, and half as many at each other listener."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "tests/system/test_unauthorized_requests.py",
         "tests/elastic/membership/test_role_loop_unauthorized.py"],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "HOLDFAST_STRANGERS": "10000", "HOLDFAST_STRANGERS_SEED": seed},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]
