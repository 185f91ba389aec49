"""Every remedy that a message names is carried out by a test, and leads out.

Remedies of the run file are in `tests/config/test_remedies.py`, those of the command line in
`test_remedies.py`. Here are those of files, stores, models and runs, in tables.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Trained
from tests.cli.remedies import of_datasets, of_models, of_others, of_runs, of_sources, of_stores
from tests.cli.remedies.lab import Case, Lab, carry_out

TABLES = (of_sources, of_datasets, of_stores, of_models, of_runs, of_others)
CASES: list[Case] = [one for table in TABLES for one in table.CASES]


@pytest.mark.parametrize("one", CASES, ids=str)
def test_the_remedy_leads_out(
    one: Case, trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    carry_out(one, Lab(tmp_path, trained.folder))
