"""What stages read in addition to documents: texts to compare with, and files of functions.

What lies there decides a stage's result, so a digest of it stands in the recipe. The path does not.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_128

from holdfast.config.sections.data import DataConfig, SourceConfig
from holdfast.config.sections.stages import StageConfig, StageTexts
from holdfast.data.filters.contamination import index_sets
from holdfast.data.filters.language import check_languages, library_version
from holdfast.data.filters.perplexity import train_model
from holdfast.data.filters.word_grams import Table, read_table, write_table
from holdfast.data.read.files import checksum, file_checksum
from holdfast.data.read.sources import plan_source, read_unit, source_files
from holdfast.data.stages.importance import count_target
from holdfast.errors import DataError

Recipe = dict[str, Any]

FOUND = ("code", "files", "library")
"""Keys of a recipe that the run file does not say: digests of what is there."""
_FINISHED = "keys"  # the array of a table that is written last


def describe_files(stage: StageConfig) -> Recipe:
    """Return what a recipe says of a stage's files and library; None for what is not there."""
    if stage.kind == "language":
        return {"library": library_version()}
    if stage.function is not None:
        path = Path(stage.place[0])
        return {"files": file_checksum(path) if path.is_file() else None}
    if not stage.texts:
        return {}
    digests = []
    for entry in stage.texts:
        files = source_files(_as_source(entry), 0)
        if not files:
            return {"files": None}
        digests += [file_checksum(Path(path)) for path, _ in files]
    return {"files": checksum(" ".join(digests).encode())}


def locate_functions(config: DataConfig) -> list[str | None]:
    """Return the file of each stage's function; None for other kinds."""
    return [os.path.realpath(s.place[0]) if s.function else None for s in config.stages]


def ready_stages(
    config: DataConfig, recipes: Sequence[Recipe], folder: Path, say: Callable[[str], None]
) -> list[Recipe]:
    """Return the recipes with the places of files and tables, which are written if they are not
    there. folder: of the tables. Raises DataError for files that cannot be used."""
    ready = []
    for index, (stage, recipe) in enumerate(zip(config.stages, recipes, strict=True)):
        where = f"data.stages[{index}]"
        if stage.kind == "language":
            check_languages(stage.languages, f"{where}.languages")
        elif stage.function is not None:
            ready.append({**recipe, "place": _function_file(stage, where)})
            continue
        elif stage.texts:
            of_recipe = checksum(str(sorted(recipe.items())).encode())
            table = folder / of_recipe
            if not (table / f"{_FINISHED}.npy").exists():
                write_table(table, _make_table(stage, where, config.max_document_bytes))
            for line in _describe_table(stage, where, table):
                say(line)
            ready.append({**recipe, "table": str(table)})
            continue
        ready.append(recipe)
    return ready


def _function_file(stage: StageConfig, where: str) -> str:
    path = Path(stage.place[0])
    if not path.is_file():
        raise DataError(
            f"{path} does not exist", where=f"{where}.function", remedy="name a Python file"
        )
    return str(path)


def _make_table(stage: StageConfig, where: str, limit: int) -> Table:
    sets = [
        _read_texts(entry, f"{where}.texts[{number}]", limit)
        for number, entry in enumerate(stage.texts)
    ]
    if stage.kind == "contamination":
        table = index_sets(sets, stage.ngram_words)
    else:
        texts = (text for texts in sets for text in texts)
        table = (
            train_model(texts, stage.order)
            if stage.kind in ("perplexity", "score")
            else count_target(texts, stage.gram_words, stage.buckets)
        )
    if not len(table["keys"]):
        what = "no text that is long enough" if stage.kind == "contamination" else "no word"
        raise DataError(f"the texts have {what}", where=f"{where}.texts", remedy="name other texts")
    rest = {name: values for name, values in table.items() if name != _FINISHED}
    return {**rest, _FINISHED: table[_FINISHED]}


def _describe_table(stage: StageConfig, where: str, table: Path) -> Iterator[str]:
    """Yield a line for each evaluation set with texts that are not looked for, or never found."""
    if stage.kind != "contamination":
        return
    counts, owners = read_table(str(table), "short", "sets")
    numbers = np.bincount(owners, minlength=len(stage.texts)).tolist()
    for entry, grams, (texts, short) in zip(stage.texts, numbers, counts.tolist(), strict=True):
        if short < texts and grams < stage.min_matches:
            yield (
                f"{where} (contamination): no document can have min_matches {stage.min_matches} "
                f"n-grams of {entry.label}, which has {grams:,} of its own; use min_matches 1"
            )
        if short:
            yield (
                f"{where} (contamination): {short:,} of {texts:,} texts of {entry.label} have too "
                "few words to be looked for"
            )


def _read_texts(entry: StageTexts, where: str, limit: int) -> Iterator[str]:
    try:
        plan = plan_source(_as_source(entry), 0, 0)
        if plan.refused:
            raise plan.refused[0]
        for unit in plan.units:
            yield from read_unit(unit, limit, xxh3_128())
    except DataError as error:
        place = (error.where or "").removeprefix(f"source {entry.label!r}: ")
        place = place.replace("data.sources[0]", where)
        place = place if place.startswith(where) else f"{where}: {place}"
        remedy = (error.remedy or "").replace("data.sources", where)
        raise DataError(error.message, where=place, remedy=remedy) from None


def _as_source(entry: StageTexts) -> SourceConfig:
    source = SourceConfig(kind=entry.kind, path=entry.path, field=entry.field, name=entry.label)
    return source.at(entry.place)
