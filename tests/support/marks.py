"""Marks a case of a test that `make campaign` runs, and `make test` does not."""

from __future__ import annotations

from typing import Any

import pytest


def in_campaign(*values: Any, **given: Any) -> Any:
    """Return the parameters of a case that another case of `make test` resembles. given: as for
    `pytest.param`, such as `id`."""
    return pytest.param(*values, marks=pytest.mark.slow, **given)
