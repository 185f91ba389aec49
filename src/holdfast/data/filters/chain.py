"""The stages of `data.stages` that judge a document by itself, one after the other."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from holdfast.data.filters.contamination import contamination_stage
from holdfast.data.filters.heuristics import heuristic_stage
from holdfast.data.filters.language import language_stage
from holdfast.data.filters.perplexity import perplexity_stage
from holdfast.data.filters.personal_data import personal_data_stage
from holdfast.data.filters.plain import length_stage, pattern_stage, remove_stage
from holdfast.data.filters.score import score_stage
from holdfast.data.filters.user_function import function_stage
from holdfast.data.filters.verdict import Stage, Verdict

_MAKERS: dict[str, Callable[[dict[str, Any]], Stage]] = {
    "gopher": heuristic_stage,
    "c4": heuristic_stage,
    "fineweb": heuristic_stage,
    "length": length_stage,
    "pattern": pattern_stage,
    "personal_data": personal_data_stage,
    "remove": remove_stage,
    "language": language_stage,
    "perplexity": perplexity_stage,
    "contamination": contamination_stage,
    "function": function_stage,
    "score": score_stage,
}
EDITORS = ("c4", "personal_data", "function")
"""Kinds that change a document that stays."""

Recipe = dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """A document after all stages, or after the one that left it out."""

    text: str
    stage: int = -1  # index in data.stages of the stage that left it out; -1: it stays
    rule: str = ""
    edits: tuple[tuple[int, str, int], ...] = ()  # (stage, what was changed, how often)
    score: float | None = None  # the number that left it out, or that `score` gives it


class Chain:
    """The stages of one source. recipes: (index in data.stages, recipe) of each."""

    def __init__(self, recipes: Sequence[tuple[int, Recipe]]):
        self._recipes = [(i, recipe) for i, recipe in recipes if recipe["kind"] in _MAKERS]
        self._by_name = {i for i, recipe in self._recipes if recipe["kind"] == "remove"}
        by_kind = {recipe["kind"]: recipe for _, recipe in recipes}
        self.shingle_words: int = by_kind.get("near_duplicates", {}).get("shingle_words", 0)
        """Words of a shingle, if documents are compared with each other."""
        self.importance = by_kind.get("importance")
        """The recipe by which n-grams are counted, if documents are chosen among all."""
        self._scoring = [i for i, recipe in self._recipes if recipe["kind"] == "score"]
        self.has_scores = bool(self._scoring)
        self.has_function = any(recipe["kind"] == "function" for _, recipe in self._recipes)

    @cached_property
    def _editors(self) -> list[tuple[int, Stage]]:
        chosen = [(i, recipe) for i, recipe in self._recipes if recipe["kind"] in EDITORS]
        return [(i, _MAKERS[recipe["kind"]](recipe)) for i, recipe in chosen]

    @cached_property
    def _stages(self) -> list[tuple[int, Stage]]:
        editors = dict(self._editors)
        return [(i, editors.get(i) or _MAKERS[r["kind"]](r)) for i, r in self._recipes]

    def judge(self, text: str) -> Outcome:
        """Apply the stages to a document, up to the first that leaves it out."""
        edits: list[tuple[int, str, int]] = []
        score = None
        for index, before, verdict in self.steps(text):
            if verdict.rule:
                return Outcome(before, index, verdict.rule, score=verdict.score)
            score = verdict.score if index in self._scoring else score
            edits += [(index, what, count) for what, count in verdict.edits]
            text = verdict.text
        return Outcome(text, edits=tuple(edits), score=score)

    def steps(self, text: str) -> Iterator[tuple[int, str, Verdict]]:
        """Yield each stage that a document meets, the text before it, and the verdict."""
        source = text
        for index, stage in self._stages:
            # The list of `remove` has hashes of documents as their source has them.
            is_listed = index in self._by_name
            verdict = Verdict(text, stage(source).rule) if is_listed else stage(text)
            if not verdict.rule and verdict.edits and not verdict.text.strip():
                verdict = Verdict(text, "nothing_left")
            yield index, text, verdict
            if verdict.rule:
                return
            text = verdict.text

    def edit(self, text: str) -> str:
        """Return a document that stays, as the stages change it."""
        for _, stage in self._editors:
            text = stage(text).text
        return text


def chain_of(recipes: Sequence[tuple[int, Recipe]]) -> Chain:
    """Return the chain of recipes; the last few stay made."""
    return _made(json.dumps(recipes))


@lru_cache(maxsize=16)
def _made(recipes: str) -> Chain:
    return Chain([(index, recipe) for index, recipe in json.loads(recipes)])
