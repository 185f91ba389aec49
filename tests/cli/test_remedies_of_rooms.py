"""Every remedy that a message names is carried out by a test, and leads out.

Remedies of the run file are in `tests/config/test_remedies.py`, those of the command line in
`test_remedies.py`. Here are those of files, stores, models and runs, in tables.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.remedies import of_models, of_sources, of_stores
from tests.cli.remedies.lab import Case, Lab, carry_out

CASES: list[Case] = [*of_sources.CASES, *of_stores.CASES, *of_models.CASES]


@pytest.mark.parametrize("one", CASES, ids=str)
def test_the_remedy_leads_out(one: Case, tmp_path: Path) -> None:
    carry_out(one, Lab(tmp_path))
