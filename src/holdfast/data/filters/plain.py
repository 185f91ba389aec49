"""Stages of one rule: the length of a document, and regular expressions."""

from __future__ import annotations

import re
from typing import Any

from holdfast.data.filters.verdict import Stage, Verdict

_WORD = re.compile(r"\S+")


def length_stage(recipe: dict[str, Any]) -> Stage:
    """Return the stage `length`. Outer white space does not count; a word has no white space."""
    low, high = recipe["min_characters"], recipe["max_characters"]
    few, many = recipe["min_words"], recipe["max_words"]

    def judge(text: str) -> Verdict:
        size = len(text.strip())
        if size < low or 0 < high < size:
            return Verdict(text, "min_characters" if size < low else "max_characters")
        if few or many:
            words = sum(1 for _ in _WORD.finditer(text))
            if words < few or 0 < many < words:
                return Verdict(text, "min_words" if words < few else "max_words")
        return Verdict(text)

    return judge


def pattern_stage(recipe: dict[str, Any]) -> Stage:
    """Return the stage `pattern`."""
    keep, drop = (
        None if recipe[name] is None else re.compile(recipe[name]) for name in ("keep", "drop")
    )

    def judge(text: str) -> Verdict:
        if keep is not None and not keep.search(text):
            return Verdict(text, "keep")
        if drop is not None and drop.search(text):
            return Verdict(text, "drop")
        return Verdict(text)

    return judge
