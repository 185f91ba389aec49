"""docs/internals/axes.md speaks of every file of the room, and of nothing that is not there."""

from __future__ import annotations

import re
from pathlib import Path

import holdfast.parallel

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "internals" / "axes.md").read_text()


def test_every_file_of_the_room_is_on_the_page() -> None:
    table = PAGE.partition("## The files of `parallel`")[2]
    named = re.findall(r"^\| `(\w+\.py)` \|", table, re.M)
    there = [p.name for folder in holdfast.parallel.__path__ for p in Path(folder).rglob("*.py")]
    assert sorted(named) == sorted(set(there) - {"__init__.py"})


def test_tests_and_modules_that_the_page_names_exist() -> None:
    for name in set(re.findall(r"`(test_\w+\.py)`", PAGE)):
        assert list((ROOT / "tests").rglob(name)), name
    for name in set(
        re.findall(r"`((?:core|train|plan|config|checkpoint|tests)/[\w/]+\.py)`", PAGE)
    ):
        assert (ROOT / "src" / "holdfast" / name).exists() or (ROOT / name).exists(), name
