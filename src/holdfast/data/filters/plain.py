"""Stages of one rule: length, regular expressions, and a list of documents by their hash."""

from __future__ import annotations

import re
from typing import Any

from xxhash import xxh3_128_intdigest

from holdfast.data.filters.verdict import Stage, Verdict
from holdfast.data.read.features import MediaText

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


def remove_stage(recipe: dict[str, Any]) -> Stage:
    """Return the stage `remove`: the documents of a list are left out."""
    names = frozenset(recipe["documents"])

    def judge(text: str) -> Verdict:
        return Verdict(text, "listed" if document_name(*hash_document(text)[:2]) in names else "")

    return judge


def document_name(high: int, low: int) -> str:
    """Return the xxh3-128 of a document in hexadecimal, from its two halves."""
    return f"{high:016x}{low:016x}"


def hash_document(text: str) -> tuple[int, int, int]:
    """Two halves of a document's hash, and its bytes; all 0 for an empty one. Raises DataError for
    an image or a recording that cannot be decoded and is not left out."""
    if isinstance(text, MediaText):
        return text.hash()
    lead, length = 0, len(text)
    while lead < length and text[lead].isspace():
        lead += 1
    if lead == length:
        return 0, 0, 0
    stop = length
    while text[stop - 1].isspace():
        stop -= 1
    body = text.encode()
    first = len(text[:lead].encode())
    last = len(body) - len(text[stop:].encode())
    digest = xxh3_128_intdigest(memoryview(body)[first:last])
    return digest >> 64, digest & (2**64 - 1), len(body)
