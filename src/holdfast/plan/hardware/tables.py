"""Rows of this package's tables: CSV with comments, every cell a text."""

from __future__ import annotations

import csv
from pathlib import Path


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a table. Lines that begin with # are comments."""
    lines = [
        line for line in path.read_text("utf-8").splitlines() if line and not line.startswith("#")
    ]
    return list(csv.DictReader(lines))
