"""What a template imports is what its workers need: no more, and none imports it in its steps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SMALL = {"torch.utils._device", "torch.profiler._cupti_monitor"}
"""A hundred lines each, of torch's own, at the first use of something."""
SYMBOLS, COMPILER, FSDP = "sympy", "torch._dynamo", "torch.distributed.fsdp"


@pytest.mark.parametrize(
    ("layout", "heavy"),
    [
        ("dp2", []),
        ("bf16.dp2", []),
        ("tp2", []),
        ("zero1.2", []),
        ("pp2", [SYMBOLS]),
        ("shard2", [SYMBOLS, COMPILER, FSDP]),
        ("pp2-shard2", [SYMBOLS, COMPILER, FSDP]),
    ],
)
def test_workers_import_nothing_that_their_template_could(
    layout: str, heavy: list[str], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "tests.elastic.preloading", layout, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["template"] == heavy
    assert {name for of_rank in found["more"] for name in of_rank} <= SMALL
