"""What `data.stages` adds to a preparation: recipes, counts, and the list of what was left out.

A recipe is what decides the result of a stage. It has keys of the run file, and digests of code and
of files that the stage reads. So the recipes are a part of a dataset's version. `removed.jsonl`
names each document that was left out by its hash. It has no text, because a document may be left
out for what it says.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import holdfast.data
from holdfast.config.sections.data import DataConfig
from holdfast.config.sections.stage_rules import CODE
from holdfast.data.filters.chain import chain_of
from holdfast.data.filters.plain import document_name
from holdfast.data.filters.shingles import HASHES
from holdfast.data.prepare.stage_files import FOUND, describe_files, ready_stages
from holdfast.data.read.files import checksum, write_atomic
from holdfast.data.read.sources import SourcePlan, Unit
from holdfast.data.stages.dedup_split import DocumentChoice, DocumentRows
from holdfast.data.stages.importance import Selection, read_target, select_documents
from holdfast.data.stages.near_duplicates import NearDuplicates, find_near_duplicates
from holdfast.data.stages.scan_tasks import StagedUnit, read_staged
from holdfast.data.stages.unit_files import UnitTables
from holdfast.data.stages.unit_tasks import DROP
from holdfast.data.stream.dataset import REMOVED

Recipe = dict[str, Any]
Rule = tuple[int, str]  # index of the stage, and its rule


def stage_recipes(config: DataConfig) -> list[Recipe]:
    """Return the recipe of each stage, JSON-safe. A value is None if its file is not there."""
    return [
        {**stage.recipe(), "code": code_digest(stage.kind), **describe_files(stage)}
        for stage in config.stages
    ]


@cache
def code_digest(kind: str) -> str:
    """Return a digest of the files that decide what a kind of stage does."""
    root = Path(holdfast.data.__path__[0])
    files = ("filters/chain.py", "filters/verdict.py", *CODE[kind])
    return checksum(b"".join((root / name).read_bytes() for name in files))


def without_found(recipes: Sequence[Recipe]) -> list[Recipe]:
    """Return the recipes as the run file says them."""
    return [{key: value for key, value in r.items() if key not in FOUND} for r in recipes]


class StagePreparation:
    """The stages of one preparation."""

    def __init__(self, config: DataConfig, path_of: Callable[[str, Unit], Path]):
        self._config, self._recipes = config, stage_recipes(config)
        self._ready: list[Recipe] = []
        self._path_of = path_of
        self._within_source = config.deduplicate == "within_source"
        self._units: list[StagedUnit] = []
        self._near: NearDuplicates | None = None
        self._selection: Selection | None = None

    def __bool__(self) -> bool:
        return bool(self._recipes)

    def open_files(self, folder: Path, say: Callable[[str], None]) -> None:
        """Make what the stages need in addition to documents. Raises DataError."""
        self._ready = ready_stages(self._config, self._recipes, folder, say)

    def editor(self, name: str) -> Callable[[str], str]:
        """Return what changes a document of a source that stays."""
        return chain_of(self.of_source(name) or []).edit

    def of_source(self, name: str) -> list[tuple[int, Recipe]] | None:
        """Return (index, recipe) of the stages that work on a source; None without any stage."""
        if not self:
            return None
        return [
            (index, recipe)
            for index, recipe in enumerate(self._ready)
            if name in recipe.get("sources", (name,))
        ]

    def read(self, units: Sequence[Unit], raw: Sequence[DocumentRows]) -> Sequence[DocumentRows]:
        """Return the rows of the documents as the stages leave them."""
        if not self:
            return raw
        self._units = [read_staged(self._path_of("scan", unit)) for unit in units]
        return UnitTables([unit.rows for unit in self._units])

    def removed(self) -> list[NDArray[np.bool_]]:
        """Return per unit the documents that a stage left out, by themselves."""
        return [unit.reasons() > 0 for unit in self._units]

    def leave_out(
        self, kept: Sequence[NDArray[np.bool_]], sources: Sequence[int]
    ) -> list[NDArray[np.bool_]]:
        """Return per unit which of the kept documents the joins leave out."""
        out = [np.zeros(len(mask), dtype=bool) for mask in kept]
        if (recipe := self._join("near_duplicates")) is not None:
            has = [unit.values == HASHES * unit.documents for unit in self._units]
            self._near = find_near_duplicates(
                UnitTables([unit.rows for unit in self._units]),
                [mask & own for mask, own in zip(kept, has, strict=True)],
                UnitTables([unit.signatures for unit in self._units]),
                sources if self._within_source else [0] * len(sources),
                recipe["similarity"],
            )
            for unit, place in zip(self._near.unit, self._near.place, strict=True):
                out[unit][place] = True
        if (recipe := self._join("importance")) is not None:
            self._selection = select_documents(
                UnitTables([unit.rows for unit in self._units]),
                [
                    mask & ~gone & (unit.grams is not None)
                    for mask, gone, unit in zip(kept, out, self._units, strict=True)
                ],
                [unit.features for unit in self._units],
                read_target(recipe),
                recipe["share"],
            )
            out = [a | b for a, b in zip(out, self._selection.left_out, strict=True)]
        return out

    def _join(self, kind: str) -> Recipe | None:
        """Return the recipe of a join, if there is one."""
        return next((recipe for recipe in self._ready if recipe["kind"] == kind), None)

    def _index(self, kind: str) -> int:
        return [recipe["kind"] for recipe in self._recipes].index(kind)

    def describe(self, plan: SourcePlan) -> Iterator[str]:
        """Yield a line for each stage that left out or changed documents of a source."""
        removed, edits = self._counts(plan)
        for stage, recipe in enumerate(self._recipes):
            left_out = {rule: n for (at, rule), n in removed.items() if at == stage}
            changed = {what: n for (at, what), n in edits.items() if at == stage}
            for verb, counts in (("left out", left_out), ("changed", changed)):
                if counts:
                    each = ", ".join(f"{rule} {n:,}" for rule, n in sorted(counts.items()))
                    total = sum(counts.values())
                    yield f"{plan.name}: stage {stage} ({recipe['kind']}) {verb} {total:,}: {each}"

    def describe_unmatched(self, plans: Sequence[SourcePlan]) -> Iterator[str]:
        """Yield a line for each stage that names documents which it did not meet."""
        for stage, recipe in enumerate(self._recipes):
            if recipe["kind"] != "remove":
                continue
            counts = [self._counts(plan)[0] for plan in plans]
            met = sum(n for count in counts for (at, _), n in count.items() if at == stage)
            if met < (number := len(recipe["documents"])):
                yield (
                    f"stage {stage} (remove) names {number:,} documents, and met {met:,}; the rest "
                    f"is in no source, or was left out before: see data.stages.{stage}.documents"
                )

    def write_removed(
        self,
        folder: Path,
        plans: Sequence[SourcePlan],
        raw: Sequence[DocumentRows],
        choice: DocumentChoice,
    ) -> dict[str, Any]:
        """Write `removed.jsonl`; return what the manifest says of the stages. Empty without any."""
        if not self:
            return {}
        number = Counter[str]()

        def lines() -> Iterator[bytes]:
            for plan in plans:
                for unit in plan.units:
                    for entry in self._entries(unit.index, raw, choice):
                        number["documents"] += 1
                        line = {"source": plan.name, **entry}
                        yield (json.dumps(line, sort_keys=True) + "\n").encode()

        digest = write_atomic(folder / REMOVED, lines(), sync=True)
        found: dict[str, Any] = {"left_out": [], "changed": []}
        for plan in plans:
            for key, counts in zip(("left_out", "changed"), self._counts(plan), strict=True):
                found[key] += [
                    {
                        "source": plan.name,
                        "stage": stage,
                        "kind": self._recipes[stage]["kind"],
                        "rule": rule,
                        "count": count,
                    }
                    for (stage, rule), count in sorted(counts.items())
                ]
        return {"stages": {**found, "removed": {"documents": number["documents"], "xxh3": digest}}}

    def _counts(self, plan: SourcePlan) -> tuple[Counter[Rule], Counter[Rule]]:
        """Return the documents that (stage, rule) left out, and what (stage, rule) changed."""
        removed, edits = Counter[Rule](), Counter[Rule]()
        for unit in plan.units if self else ():
            staged = self._units[unit.index]
            times = np.bincount(staged.reasons(), minlength=len(staged.names) + 1)[1:]
            removed.update(dict(zip(staged.names, times.tolist(), strict=True)))
            edits.update({(stage, what): n for stage, what, n in staged.edits})
            if self._near is not None:
                near = int((self._near.unit == unit.index).sum())
                removed.update({(self._index("near_duplicates"), "similarity"): near})
            if self._selection is not None:
                count = int(self._selection.left_out[unit.index].sum())
                removed.update({(self._index("importance"), "share"): count})
        return +removed, +edits

    def _entries(
        self, unit: int, raw: Sequence[DocumentRows], choice: DocumentChoice
    ) -> Iterator[dict[str, Any]]:
        """Yield what `removed.jsonl` says of the documents of a unit, in their order."""
        staged, rows = self._units[unit], raw[unit]
        reasons, scores = staged.reasons(), staged.scores()
        near = self._near.in_unit(unit) if self._near is not None else {}
        out = (choice.lots[unit] == DROP) & (rows[:, 2] > 0)
        for place in np.flatnonzero(out).tolist():
            entry: dict[str, Any] = {"document": _name(rows[place])}
            if reason := int(reasons[place]):
                stage, rule = staged.names[reason - 1]
                entry |= {"stage": stage, "kind": self._recipes[stage]["kind"], "rule": rule}
                if not np.isnan(score := scores[place]):
                    entry["score"] = float(f"{score:.6g}")
            elif place in near:
                other, other_place, estimate = near[place]
                entry |= {"stage": self._index("near_duplicates"), "kind": "near_duplicates"}
                entry |= {"rule": "similarity", "similarity": estimate}
                entry["repeats"] = _name(raw[other][other_place])
            elif self._selection is not None and self._selection.left_out[unit][place]:
                entry |= {"stage": self._index("importance"), "kind": "importance"}
                weight = self._selection.log_weights[unit][place]
                entry |= {"rule": "share", "score": float(f"{weight:.6g}")}
            else:
                entry["kind"] = "duplicate"
            yield entry


def _name(row: NDArray[np.uint64]) -> str:
    """Return the name of a document as its source has it."""
    return document_name(int(row[0]), int(row[1]))
