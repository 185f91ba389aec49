"""One tiny finished run for the tests that only read it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from fcntl import LOCK_EX, flock
from pathlib import Path

import pytest

from tests.support.commands import Outcome, apart, write_run_file


@dataclass(frozen=True)
class Trained:
    root: Path
    outcome: Outcome  # of `holdfast train`

    @property
    def run_file(self) -> Path:
        return self.root / "run.yaml"

    @property
    def folder(self) -> Path:
        return self.root / "run"


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Six steps by two workers, dataset prepared on the way. Do not change it: copy it. Processes
    of one test run share it: the first one trains."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    root, done = base / "trained", base / "trained.json"
    with (base / "trained.lock").open("w") as turn:
        flock(turn, LOCK_EX)
        if not done.exists():
            outcome = apart("train", write_run_file(root), folder=root)
            assert outcome.code == 0, outcome.out + outcome.err
            done.write_text(json.dumps(asdict(outcome)))
    return Trained(root, Outcome(**json.loads(done.read_text())))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands write where they stand: let that be the test's own folder."""
    monkeypatch.chdir(tmp_path)
