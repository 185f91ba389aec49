"""The entries of `data.stages`: what is left out of the sources, and what is changed in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from holdfast.config.sections.base import Section, check_each
from holdfast.config.sections.stage_rules import PERSONAL_ITEMS, RULES

USED_KEYS: dict[str, tuple[str, ...]] = {
    "gopher": ("skip_rules",),
    "c4": ("skip_rules",),
    "fineweb": ("skip_rules",),
    "length": ("min_characters", "max_characters", "min_words", "max_words"),
    "pattern": ("keep", "drop"),
    "personal_data": ("items", "action"),
    "remove": ("documents",),
    "near_duplicates": ("similarity", "shingle_words"),
}
"""Kind -> the keys that have a meaning for it."""

JOINS = ("near_duplicates",)
"""Kinds that compare documents with each other. They come last."""


class StageConfig(Section):
    """One stage of cleaning (docs/guide/data-stages.md)."""

    kind: Literal[
        "gopher", "c4", "fineweb", "length", "pattern", "personal_data", "remove", "near_duplicates"
    ]
    """what the stage does; a key of another kind is refused"""
    sources: tuple[str, ...] = ()
    """names of the sources that it works on; empty: all"""
    skip_rules: tuple[str, ...] = ()
    """gopher, c4, fineweb: rules by name that are not applied"""
    min_characters: int = Field(0, ge=0, description="length: a shorter document is left out")
    max_characters: int = Field(0, ge=0, description="length: a longer one is left out; 0: none")
    min_words: int = Field(0, ge=0, description="length: fewer words are too few")
    max_words: int = Field(0, ge=0, description="length: more words are too many; 0: none")
    keep: str | None = None
    """pattern: a document without a match of this regular expression is left out"""
    drop: str | None = None
    """pattern: a document with a match of this regular expression is left out"""
    items: tuple[str, ...] = PERSONAL_ITEMS
    """personal_data: the kinds of items that are looked for"""
    action: Literal["redact", "drop"] = "redact"
    """personal_data: an item is replaced by its kind, as [EMAIL], or its document is left out"""
    documents: Annotated[
        tuple[str, ...], check_each(r"[0-9a-f]{32}", "is no hash: use what data who-read prints")
    ] = ()
    """remove: hashes of documents that are left out, as holdfast data who-read prints them"""
    similarity: float = Field(0.8, ge=0.5, le=1)
    """near_duplicates: documents with this share of common shingles are duplicates"""
    shingle_words: int = Field(5, ge=1, le=20)
    """near_duplicates: words of a shingle"""

    def broken_rules(self) -> Iterator[str]:
        used = ("kind", "sources", *USED_KEYS[self.kind])
        for name, info in type(self).model_fields.items():
            default = info.get_default(call_default_factory=True, validated_data={})
            if name not in used and getattr(self, name) != default:
                yield f"{name} has no meaning for kind {self.kind}: remove it"
        if unknown := set(self.skip_rules) - set(RULES.get(self.kind, ())):
            yield (
                f"skip_rules has {min(unknown)}, no rule of {self.kind}: use "
                f"[{', '.join(RULES[self.kind])}]"
            )
        if unknown := set(self.items) - set(PERSONAL_ITEMS):
            yield f"items has {min(unknown)}: use [{', '.join(PERSONAL_ITEMS)}]"
        if self.kind == "personal_data" and not self.items:
            yield f"items is empty: use [{', '.join(PERSONAL_ITEMS)}]"
        if self.kind == "remove" and not self.documents:
            yield (
                f"kind remove has no documents: use documents [{'a' * 32}], with hashes that "
                "holdfast data who-read prints"
            )
        if self.kind == "length":
            yield from self._broken_lengths()
        if self.kind == "pattern":
            yield from self._broken_patterns()

    def _broken_lengths(self) -> Iterator[str]:
        if not any(getattr(self, name) for name in USED_KEYS["length"]):
            yield "kind length has no limit: use min_words 1, or another limit"
        for low, high in (("min_characters", "max_characters"), ("min_words", "max_words")):
            if 0 < getattr(self, high) < getattr(self, low):
                yield (
                    f"{low} is above {high}, so nothing would stay: use {low} {getattr(self, high)}"
                )

    def _broken_patterns(self) -> Iterator[str]:
        if self.keep is None and self.drop is None:
            yield "kind pattern has no expression: use drop 'an expression', or keep"
        for name in ("keep", "drop"):
            try:
                re.compile(getattr(self, name) or "")
            except re.error as error:
                yield (
                    f"{name} is no regular expression ({error}): use one that Python's re accepts"
                )

    def recipe(self) -> dict[str, Any]:
        """Return what of the entry decides the result: JSON-safe, its kind first."""
        names = ("kind", *(("sources",) if self.sources else ()), *USED_KEYS[self.kind])
        values = self.model_dump(mode="json")
        return {name: values[name] for name in names}
