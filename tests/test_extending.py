"""docs/internals/extending.md: an extension has at most six places, and they exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "internals" / "extending.md").read_text()
SECTIONS = {text.partition("\n")[0]: text for text in re.split(r"^## ", PAGE, flags=re.M)[1:]}
MAX_FILES = 6


def test_the_page_has_the_extensions_that_are_promised() -> None:
    kinds = "axis", "schedule", "optimizer", "owner", "family", "policy", "option"
    assert [kind for kind in kinds if not re.search(kind, " ".join(SECTIONS))] == []


@pytest.mark.parametrize("section", SECTIONS)
def test_an_extension_has_few_places_and_they_exist(section: str) -> None:
    files = re.findall(r"^\d+\. `([^`]+)`", SECTIONS[section], re.M)
    assert 1 <= len(files) <= MAX_FILES
    for file in [*files, *re.findall(r"`(tests/[\w/.]+)`", SECTIONS[section])]:
        path = ROOT / file
        there = next(p for p in (path, *path.parents) if "NAME" not in str(p))
        assert there.exists(), file
