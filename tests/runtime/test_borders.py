"""Borders: their own rules, and the table that names each with the test that walks it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdfast.borders import Border, Unread
from holdfast.errors import ConfigError
from tests.support.borders import all_borders, unknown_entries

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reference/borders.md"
LIST = Border("x.json", frozenset({"rank"}), frozenset({"author"}), {"bias": ("none", 0)})


def test_what_is_listed_passes_and_what_is_not_is_named() -> None:
    entries = {"rank": 3, "author": "me", "bias": "none", "note": None, "flag": False, "list": []}
    assert LIST.check(entries, "x", ConfigError, "mend it") == ()
    with pytest.raises(ConfigError, match=r"bias all.*'ranc'.*did you mean rank.*mend it"):
        LIST.check(entries | {"bias": "all", "ranc": 0}, "x", ConfigError, "mend it")


def test_false_is_not_0_and_0_says_something() -> None:
    assert LIST.unread({"a": 0, "b": False, "c": 0.0, "d": ""}) == ("a", "c")
    number = Border("x", frozenset(), plain={"scale": (1,)})
    assert number.problems({"scale": True})
    assert not number.problems({"scale": 1.0})


def test_one_line_counts_what_is_not_read() -> None:
    border = Border("rows", frozenset({"text"}), unknown="count", entry="column")
    unread = Unread(border)
    assert not unread.line()
    for line in range(3):
        names = border.check({"text": 1, "meta": 0}, "f", ConfigError, "")
        unread.add(names, f"f.jsonl:{line + 1}")
    assert "column meta (3 times, first in f.jsonl:1)" in unread.line()


def test_the_table_names_each_border_and_the_test_that_walks_it() -> None:
    page = PAGE.read_text("utf-8")
    for module, constant, border in all_borders():
        assert set(unknown_entries(border)).isdisjoint({*border.used, *border.harmless})
        rows = [row for row in page.splitlines() if row.startswith(f"| {border.name} |")]
        assert len(rows) == 1, f"{PAGE.name} needs one row for {border.name!r} of {module}"
        tests = re.findall(r"tests/[\w/]+\.py", rows[0])
        texts = [(ROOT / test).read_text("utf-8") for test in tests]
        assert any(constant in text and "unknown_entries" in text for text in texts), (
            f"the row of {border.name!r} names no test that draws unknown_entries of {constant}"
        )
