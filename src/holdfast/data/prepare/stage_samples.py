"""What stages do to a sample of documents, and what the documents of each source are like.

The sample is spread over a source: some units in even steps, and the first documents of each. It
depends on the sources alone. Nothing is prepared or written.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from xxhash import xxh3_128

from holdfast.config.sections.data import DataConfig
from holdfast.config.sections.stage_rules import PERSONAL_ITEMS
from holdfast.data.filters.chain import Chain
from holdfast.data.filters.language import identify, library_version
from holdfast.data.filters.plain import document_name, hash_document
from holdfast.data.filters.shingles import signature
from holdfast.data.prepare.remote_sources import fetch_sources
from holdfast.data.prepare.stage_files import ready_stages
from holdfast.data.prepare.stage_recipes import stage_recipes
from holdfast.data.read.features import FeatureFormat
from holdfast.data.read.sources import plan_source, read_unit
from holdfast.data.stages.importance import Features, features, read_target, select_documents
from holdfast.data.stages.near_duplicates import find_near_duplicates

SAMPLED_UNITS = 32
EXCERPT = 200
"""Characters of a text that an example shows."""
HEURISTICS = ("gopher", "c4", "fineweb")
LANGUAGES = 3
"""Languages of a source that are named, the most frequent first."""

GROUPS = {
    "women": "woman women girl girls mother mothers daughter wife female",
    "men": "man men boy boys father fathers son husband male",
    "christian": "christian christians church catholic protestant jesus",
    "muslim": "muslim muslims islam islamic mosque quran",
    "jewish": "jew jews jewish judaism synagogue",
    "hindu, buddhist": "hindu hindus hinduism buddhist buddhists buddhism",
    "african": "african africans africa black",
    "asian": "asian asians asia chinese indian japanese",
    "european": "european europeans europe white british german french",
    "latin american": "latino latina latinos hispanic mexican brazilian",
    "gay, trans": "gay lesbian bisexual transgender queer lgbt lgbtq",
}
"""Group -> English words. Filters leave out texts about some groups more often than other texts
(Dodge et al. 2021, arXiv 2104.08758)."""


@dataclass
class Example:
    """A document before and after a stage, in excerpts. after: "" if it was left out. Items of
    personal data are replaced by their kind in both."""

    document: str  # its hash, as its source has it
    rule: str
    before: str
    after: str = ""
    score: float | None = None


@dataclass
class StageSample:
    """What a stage did to the documents of a source that it met."""

    stage: int
    kind: str
    met: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    changed: dict[str, int] = field(default_factory=dict)
    examples: list[Example] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    """the number that it judges each document by, if it has one"""


@dataclass
class GroupCount:
    """Documents that mention a group, and those of them that stages leave out."""

    group: str
    documents: int = 0
    left_out: int = 0


@dataclass
class SourceSample:
    """A sample of a source. Shares are of its documents, as the source has them."""

    name: str
    documents: int
    left_out: int
    median_words: float
    repeated: int  # equal to an earlier document of the sample
    heuristics: dict[str, int]  # documents that each would leave out
    personal_items: int
    languages: dict[str, int] | None  # None without the library
    groups: list[GroupCount]
    stages: list[StageSample]


def sample_sources(config: DataConfig, documents: int, examples: int) -> list[SourceSample]:
    """Apply the stages to samples of the sources.

    Args:
        documents: at most so many of each source.
        examples: at most so many of each stage, for a source.

    Raises:
        DataError: for sources or stages that cannot be used.
    """
    with TemporaryDirectory(prefix="holdfast-show-") as folder:
        ready = ready_stages(config, stage_recipes(config), Path(folder), lambda _: None)
        found = []
        config = config.model_copy(
            update={"sources": fetch_sources(config, lambda _: None, lambda *_: None)}
        )
        for index in range(len(config.sources)):
            name, texts = _texts_of(config, index, documents)
            recipes = [(i, r) for i, r in enumerate(ready) if name in r.get("sources", (name,))]
            found.append(_sample(name, texts, recipes, examples))
        return found


def _texts_of(config: DataConfig, index: int, documents: int) -> tuple[str, list[str]]:
    """Return the name of a source, and some of its documents that are not empty."""
    tokenizer, features = config.tokenizer.place, FeatureFormat.of(config.features)
    plan = plan_source(config.sources[index], index, 0, None, tokenizer, features)
    if plan.refused:
        raise plan.refused[0]
    count = min(SAMPLED_UNITS, len(plan.units), documents)
    units = [plan.units[i * len(plan.units) // count] for i in range(count)]
    texts: list[str] = []
    for number, unit in enumerate(units, start=1):
        stop = documents * number // count
        read = read_unit(unit, config.max_document_bytes, xxh3_128())
        texts += islice(filter(str.strip, read), stop - len(texts))
    return plan.name, texts


def _sample(
    name: str, texts: list[str], recipes: list[tuple[int, dict[str, Any]]], examples: int
) -> SourceSample:
    chain = Chain(recipes)
    stages = {i: StageSample(i, recipe["kind"]) for i, recipe in recipes}
    gone = [False] * len(texts)
    kept: list[tuple[int, str]] = []
    for place, text in enumerate(texts):
        after = text
        for index, before, verdict in chain.steps(text):
            _count(stages[index], text, before, verdict, examples)
            gone[place], after = bool(verdict.rule), verdict.text
        if not gone[place]:
            kept.append((place, after))
    for index, recipe in recipes:
        if (join := _JOINS.get(recipe["kind"])) is not None:
            for place in list(join(stages[index], texts, kept, recipe, examples)):
                gone[place] = True
            kept = [(place, text) for place, text in kept if not gone[place]]
    words = [set(re.findall(r"[a-z]+", text.lower())) for text in texts]
    groups = []
    for group, listed in GROUPS.items():
        about = [bool(own & set(listed.split())) for own in words]
        out = sum(a and b for a, b in zip(about, gone, strict=True))
        groups.append(GroupCount(group, sum(about), out))
    return SourceSample(
        name,
        len(texts),
        sum(gone),
        median([len(text.split()) for text in texts] or [0]),
        len(texts) - len({hash_document(text) for text in texts}),
        {kind: sum(bool(_of(kind).judge(t).rule) for t in texts) for kind in HEURISTICS},
        sum(n for text in texts for _, _, n in _redactor().judge(text).edits),
        _languages(texts),
        groups,
        list(stages.values()),
    )


def _count(stage: StageSample, text: str, before: str, verdict: Any, examples: int) -> None:
    stage.met += 1
    if verdict.score is not None:
        stage.scores.append(verdict.score)
    if verdict.rule:
        stage.left_out[verdict.rule] = stage.left_out.get(verdict.rule, 0) + 1
    for what, count in () if verdict.rule else verdict.edits:
        stage.changed[what] = stage.changed.get(what, 0) + count
    if len(stage.examples) >= examples or not (verdict.rule or verdict.edits):
        return
    rule = verdict.rule or ", ".join(what for what, _ in verdict.edits)
    if sum(example.rule == rule for example in stage.examples) > examples // 2:
        return  # other rules have a place, too
    shown = _excerpts(before, "" if verdict.rule else verdict.text)
    name = document_name(*hash_document(text)[:2])
    stage.examples.append(Example(name, rule, *shown, verdict.score if verdict.rule else None))


def _near(
    stage: StageSample,
    texts: list[str],
    kept: list[tuple[int, str]],
    recipe: dict[str, Any],
    examples: int,
) -> Iterator[int]:
    """Yield the places of documents that are near duplicates of another one of the sample."""
    stage.met = len(kept)
    if not kept:
        return
    rows = np.array([hash_document(text) for _, text in kept], dtype=np.uint64)
    values = np.stack([signature(text, recipe["shingle_words"]) for _, text in kept])
    everything = [np.ones(len(kept), dtype=bool)]
    near = find_near_duplicates([rows], everything, [values], [0], recipe["similarity"])
    if len(near.place):
        stage.left_out["similarity"] = len(near.place)
    for one, other, share in zip(near.place, near.repeated_place, near.similarity, strict=True):
        place = kept[int(one)][0]
        if len(stage.examples) < examples:
            name = document_name(*hash_document(texts[place])[:2])
            before, after = _excerpts(kept[int(one)][1], kept[int(other)][1])
            stage.examples.append(Example(name, "similarity", before, after, float(share)))
        yield place


def _least_important(
    stage: StageSample,
    texts: list[str],
    kept: list[tuple[int, str]],
    recipe: dict[str, Any],
    examples: int,
) -> Iterator[int]:
    """Yield the places of documents that `importance` leaves out of the sample."""
    stage.met = len(kept)
    if not kept:
        return
    rows = np.array([hash_document(text) for _, text in kept], dtype=np.uint64)
    parts = [features(text, recipe["gram_words"], recipe["buckets"]) for _, text in kept]
    grams = Features(np.cumsum([len(part) for part in parts]), np.concatenate(parts))
    everything, target = [np.ones(len(kept), dtype=bool)], read_target(recipe)
    found = select_documents([rows], everything, [lambda: grams], target, recipe["share"])
    stage.scores = found.log_weights[0].tolist()
    for number in np.flatnonzero(found.left_out[0]).tolist():
        stage.left_out["share"] = stage.left_out.get("share", 0) + 1
        place, text = kept[number]
        if len(stage.examples) < examples:
            name = document_name(*hash_document(texts[place])[:2])
            excerpts = _excerpts(text, "")
            stage.examples.append(Example(name, "share", *excerpts, stage.scores[number]))
        yield place


_JOINS = {"near_duplicates": _near, "importance": _least_important}


def _excerpts(before: str, after: str) -> tuple[str, str]:
    """Return excerpts of a document before and after, around the first place where they differ."""
    pairs = enumerate(zip(before, after, strict=False))
    differs = next((i for i, (a, b) in pairs if a != b), min(len(before), len(after)))
    place = max(0, differs - EXCERPT // 4)
    before, after = (_redactor().edit(text) for text in (before, after))
    return _excerpt(before, place), _excerpt(after, place)


def _excerpt(text: str, start: int) -> str:
    cut = text[start : start + EXCERPT]
    lead, end = "..." if start else "", "..." if start + EXCERPT < len(text) else ""
    return lead + cut + end


def _languages(texts: list[str]) -> dict[str, int] | None:
    if library_version() is None:
        return None
    return dict(Counter(identify(text)[0] for text in texts).most_common(LANGUAGES))


@cache
def _of(kind: str) -> Chain:
    return Chain([(0, {"kind": kind, "skip_rules": []})])


@cache
def _redactor() -> Chain:
    recipe = {"kind": "personal_data", "items": list(PERSONAL_ITEMS), "action": "redact"}
    return Chain([(0, recipe)])
