"""One tiny finished run for the tests that only read it."""

from __future__ import annotations

from dataclasses import dataclass
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
    """Six steps by two workers, dataset prepared on the way. Do not change it: copy it."""
    root = tmp_path_factory.mktemp("trained")
    run_file = write_run_file(root)
    outcome = apart("train", run_file, folder=root)
    assert outcome.code == 0, outcome.out + outcome.err
    return Trained(root, outcome)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands write where they stand: let that be the test's own folder."""
    monkeypatch.chdir(tmp_path)
