"""Rows of this package's tables: CSV with comments, every cell a text."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path

from holdfast.errors import DataError


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a table. Lines that begin with # are comments."""
    lines = [
        line for line in path.read_text("utf-8").splitlines() if line and not line.startswith("#")
    ]
    return list(csv.DictReader(lines))


def nearest(name: str, known: Mapping[str, object]) -> str:
    """The known name that was probably meant, "" if none is near."""
    lower = {each.lower(): each for each in known}
    near = get_close_matches(name.lower(), lower, n=1, cutoff=0.3)
    return lower[near[0]] if near else ""


def missing_name(kind: str, name: str, known: Mapping[str, object], where: str) -> DataError:
    """The refusal of a name that a table does not have."""
    return DataError(
        f"there is no {kind} {name!r}",
        where=where,
        remedy=f"use {nearest(name, known) or 'one of ' + ', '.join(known)}",
    )
