"""Remedies of files, stores, models and runs, carried out: one a class of error and room.

`tests/runtime/config/test_mutations.py` follows those of the run file, `test_remedies.py` those of
the command line. `test_refusals.py` has rules for all of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.cli.conftest import Trained
from tests.runtime.cli.remedies import of_lab, of_models, of_platform, of_runs
from tests.runtime.cli.remedies.lab import Case, Lab, carry_out

CASES = [*of_models.CASES, *of_runs.CASES, *of_lab.CASES, *of_platform.CASES]


@pytest.mark.parametrize("one", CASES, ids=str)
def test_the_remedy_leads_out(
    one: Case, trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    carry_out(one, Lab(tmp_path, trained.folder))
