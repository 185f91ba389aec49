"""Microbatches exchanged, repeated and dropped in real workers: the audit names each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import within, write_run_file


@pytest.mark.slow
def test_the_audit_finds_what_real_workers_fed_wrongly(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path)
    trained = subprocess.run(
        [sys.executable, "-m", "tests.support.faulty_data_trainer", str(run_file)],
        capture_output=True,
        text=True,
        timeout=90,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert trained.returncode == 0, trained.stderr
    audit = within("data", "audit", tmp_path / "run", "--json")
    assert audit.code == 1, audit.err
    found = json.loads(audit.out)
    assert not found["ok"]
    assert [(p["kind"], p["step"], p["microbatch"]) for p in found["problems"]] == [
        ("swapped", 2, 0),
        ("swapped", 2, 3),
        ("repeated", 4, 2),
        ("wrong", 5, 1),
    ]
    said = within("data", "audit", tmp_path / "run").out
    assert said.startswith("4 problems; the first: step 2, microbatch 0 (rank 0): exchanged with")
    assert "fed the tokens of microbatch 1 of step 4; its own were never fed" in said
