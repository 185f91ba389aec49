"""The entries of `data.stages`: what is left out of the sources, and what is changed in them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr

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
    "language": ("languages", "min_probability"),
    "perplexity": ("texts", "order", "min_perplexity", "max_perplexity"),
    "contamination": ("texts", "ngram_words", "min_matches"),
    "function": ("function",),
    "score": ("texts", "order", "function"),
    "near_duplicates": ("similarity", "shingle_words"),
    "importance": ("texts", "share", "gram_words", "buckets"),
}
"""Kind -> the keys that have a meaning for it."""

JOINS = ("near_duplicates", "importance")
"""Kinds that compare documents with each other. They come last."""


class StageTexts(Section):
    """Texts that documents are compared with. They do not become a part of the dataset."""

    kind: Literal["text", "jsonl", "csv", "parquet"] = "text"
    """how they are read, as in data.sources"""
    path: str
    """file, folder or glob"""
    name: str | None = Field(None, description="name in counts; the file's name if left out")
    field: str = Field("text", description="field of JSON, or column, that holds the text")
    _place: str | None = PrivateAttr(None)

    @property
    def place(self) -> str:
        """The place of `path` (`config.loading.paths`); the path itself without a run file."""
        return self._place or self.path

    @property
    def label(self) -> str:
        return self.name or self.path.rstrip("/").rpartition("/")[2]

    def at(self, place: str | None) -> StageTexts:
        located = self.model_copy()
        located._place = place
        return located


class StageConfig(Section):
    """One stage of cleaning (docs/guide/data-stages.md)."""

    kind: Literal[
        "gopher",
        "c4",
        "fineweb",
        "length",
        "pattern",
        "personal_data",
        "remove",
        "language",
        "perplexity",
        "contamination",
        "function",
        "score",
        "near_duplicates",
        "importance",
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
    languages: Annotated[
        tuple[str, ...], check_each(r"[a-z]{2,3}", "is no code of a language: use one such as en")
    ] = ()
    """language: codes of the languages that stay, as in ISO 639"""
    min_probability: float = Field(0.5, ge=0, le=1)
    """language: a document whose language is less certain is left out"""
    texts: tuple[StageTexts, ...] = ()
    """perplexity, score: what the model is trained on; contamination: the evaluation sets;
    importance: what documents should be like"""
    order: int = Field(3, ge=1, le=5, description="perplexity, score: words of an n-gram")
    min_perplexity: float = Field(0, ge=0)
    """perplexity: a document that is easier to predict is left out"""
    max_perplexity: float = Field(0, ge=0)
    """perplexity: a document that is harder to predict is left out; 0: none"""
    ngram_words: int = Field(13, ge=3, le=50, description="contamination: words of an n-gram")
    min_matches: int = Field(1, ge=1)
    """contamination: a document with so many n-grams of an evaluation set is left out"""
    function: str | None = None
    """function, score: FILE.py:NAME, path of a Python file and a function in it"""
    similarity: float = Field(0.8, ge=0.5, le=1)
    """near_duplicates: documents with this share of common shingles are duplicates"""
    shingle_words: int = Field(5, ge=1, le=20)
    """near_duplicates: words of a shingle"""
    share: float = Field(0.5, gt=0, lt=1)
    """importance: share of the documents that stay"""
    gram_words: int = Field(2, ge=1, le=5)
    """importance: words of the longest n-grams that are counted"""
    buckets: int = Field(10_000, ge=256, le=65_536)
    """importance: numbers to which n-grams are hashed"""
    _place: str | None = PrivateAttr(None)

    @property
    def place(self) -> tuple[str, str]:
        """The file and the name of `function`; the file as it is written without a run file."""
        file, _, name = (self._place or self.function or "").rpartition(":")
        return file, name

    def at(self, function: str | None, texts: Sequence[str | None]) -> StageConfig:
        """Return the stage whose files are known: the place of `function`, and of each text."""
        located = self.model_copy(
            update={"texts": tuple(t.at(p) for t, p in zip(self.texts, texts, strict=True))}
        )
        located._place = function
        return located

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
        yield from self._broken_comparisons()
        if self.kind == "length":
            yield from self._broken_lengths()
        if self.kind == "pattern":
            yield from self._broken_patterns()

    def _broken_comparisons(self) -> Iterator[str]:
        if self.kind == "language" and not self.languages:
            yield "kind language has no languages: use languages [en], with codes of ISO 639"
        if self.kind in ("perplexity", "contamination", "importance") and not self.texts:
            yield f"kind {self.kind} has no texts: use texts [{{path: texts.txt}}]"
        labels = [entry.label for entry in self.texts]
        if repeated := [label for label in labels if labels.count(label) > 1]:
            yield f"texts has the name {repeated[0]} twice: use name to give each its own"
        if self.kind == "perplexity" and not self.min_perplexity and not self.max_perplexity:
            yield "kind perplexity has no limit: use max_perplexity 1000, or min_perplexity"
        if 0 < self.max_perplexity < self.min_perplexity:
            yield (
                "min_perplexity is above max_perplexity, so nothing would stay: use min_perplexity "
                f"{self.max_perplexity:g}"
            )
        if self.kind == "score" and bool(self.texts) == bool(self.function):
            yield "kind score has one source of numbers: use texts, or function grade.py:grade"
        is_called = self.kind == "function" or self.function is not None
        if is_called and not re.fullmatch(r".+\.py:\w+", self.function or ""):
            yield (
                f"function {self.function!r} is no file and name: use the form cleaning.py:is_kept"
            )

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
        """Return what of the entry decides the result: JSON-safe, its kind first. Paths do not:
        what lies there does."""
        names = ("kind", *(("sources",) if self.sources else ()), *USED_KEYS[self.kind])
        values = self.model_dump(mode="json")
        values["texts"] = [
            {"kind": entry.kind, "name": entry.label, "field": entry.field} for entry in self.texts
        ]
        if self.function is not None:
            values["function"] = self.function.rpartition(":")[2]
        return {name: values[name] for name in names}
