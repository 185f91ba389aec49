"""Versions of a dataset: which there are, why two differ, and which documents one of them lacks.

A version stands for its inputs, for the code and the files of its stages, and for its parameters.
The manifest has a digest of each. A document is named by its text as the stages leave it, which
follows from its tokens. So no index of documents is needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128_intdigest

from holdfast.core.json_parsing import parse_json
from holdfast.data.filters.plain import document_name, hash_document
from holdfast.data.read.features import hash_media
from holdfast.data.read.vocabulary import load_tokenizer
from holdfast.data.stream.dataset import MANIFEST, REMOVED, Dataset
from holdfast.data.stream.document_reads import DocumentPlace
from holdfast.data.stream.verify import is_list_damaged
from holdfast.errors import DataError

INPUT, CODE, PARAMETER = "input", "code", "parameter"
FOUND = {"code": CODE, "library": CODE, "files": INPUT}
"""Keys of a stage's recipe that the run file does not say -> what they are of."""
SOURCE_KEYS = ("files", "bytes", "documents", "xxh3")


@dataclass(frozen=True)
class Difference:
    """One reason why two versions differ."""

    what: str  # input, code or parameter
    where: str  # source, or key of the run file
    before: Any
    after: Any

    def describe(self) -> str:
        before, after = (json.dumps(value) for value in (self.before, self.after))
        return f"{self.what}: {self.where}: {before}, then {after}"


@dataclass(frozen=True)
class DocumentDifference:
    """Documents by name that only one of two datasets has, with their sources."""

    only_before: dict[str, list[DocumentPlace]]
    only_after: dict[str, list[DocumentPlace]]


def find_datasets(folder: Path) -> Iterator[tuple[Path, Dataset | DataError]]:
    """Yield the datasets in and below a folder, by path, and what is wrong with those that cannot
    be opened. Raises DataError for a folder that is not there."""
    if not folder.is_dir():
        raise DataError(
            "there is no such folder", where=str(folder), remedy="name a folder with datasets"
        )
    for path in sorted(folder.rglob(MANIFEST)):
        try:
            yield path.parent, Dataset.open(path.parent)
        except DataError as error:
            yield path.parent, error


def find_versions(dataset: Dataset) -> list[Dataset]:
    """Return the datasets next to one that have sources of the same names, in the order in which
    they were prepared."""
    found = [one for _, one in find_datasets(dataset.folder.parent) if isinstance(one, Dataset)]
    alike = [one for one in found if one.source_names == dataset.source_names]
    return sorted(alike, key=lambda one: (one.folder / MANIFEST).stat().st_mtime_ns)


def compare_recipes(before: Dataset, after: Dataset) -> list[Difference]:
    """Return why two datasets differ: inputs, then code, then parameters."""
    found = list(_compare_sources(before.manifest["sources"], after.manifest["sources"]))
    settings = before.manifest["settings"], after.manifest["settings"]
    stages = [one.get("stages", []) for one in settings]
    for index, (old, new) in enumerate(zip_longest(*stages)):
        found += _compare_stage(f"data.stages[{index}]", old, new)
    for key in sorted({*settings[0], *settings[1]} - {"sources", "stages"}):
        old, new = (one.get(key) for one in settings)
        if old != new:
            found.append(Difference(PARAMETER, f"data.{key}", old, new))
    shards = [{s.tokens for s in one.shards()} for one in (before, after)]
    if not found and before.version != after.version and shards[0] != shards[1]:
        old, new = (max(sizes, default=0) for sizes in shards)
        found.append(Difference(PARAMETER, "data.shard_tokens: the largest shard", old, new))
    order = (INPUT, CODE, PARAMETER)
    return sorted(found, key=lambda one: order.index(one.what))


def _compare_sources(before: Any, after: Any) -> Iterator[Difference]:
    old, new = ({one["name"]: one for one in sources} for sources in (before, after))
    for name in dict.fromkeys([*old, *new]):
        values = [
            {k: one[name][k] for k in SOURCE_KEYS} if name in one else None for one in (old, new)
        ]
        if values[0] != values[1]:
            yield Difference(INPUT, f"source {name}", *values)
        for key in (
            ("kind", "field", "split", "rows", "media") if name in old and name in new else ()
        ):
            if old[name].get(key) != new[name].get(key):
                place = f"data.sources ({name}).{key}"
                yield Difference(PARAMETER, place, old[name].get(key), new[name].get(key))
    if list(old) != list(new) and sorted(old) == sorted(new):
        yield Difference(PARAMETER, "data.sources: order", list(old), list(new))


def _compare_stage(place: str, old: Any, new: Any) -> Iterator[Difference]:
    if old is None or new is None or old["kind"] != new["kind"]:
        kinds = (None if one is None else one["kind"] for one in (old, new))
        yield Difference(PARAMETER, place, *kinds)
        return
    for key in {**old, **new}:
        if old.get(key) != new.get(key):
            what = FOUND.get(key, PARAMETER)
            yield Difference(what, f"{place} ({new['kind']}).{key}", old.get(key), new.get(key))


def compare_documents(before: Dataset, after: Dataset) -> DocumentDifference:
    """Return the documents that only one of two datasets has. One that is there more often in one
    of them counts as its own, so often."""
    same_tokens = _has_same_tokenizer(before, after)
    found = [_places_by_digest(one, by_text=not same_tokens) for one in (before, after)]
    only: list[dict[str, list[DocumentPlace]]] = []
    for (dataset, own), other in zip(
        zip((before, after), found, strict=True), found[::-1], strict=True
    ):
        named: dict[str, list[DocumentPlace]] = {}
        for digest, places in own.items():
            for place in places[len(other.get(digest, ())) :]:
                named.setdefault(name_at(dataset, place), []).append(place)
        only.append(named)
    return DocumentDifference(*only)


def find_named(dataset: Dataset, names: set[str]) -> dict[str, list[DocumentPlace]]:
    """Return the places of documents by name, of those that the dataset has."""
    found: dict[str, list[DocumentPlace]] = {}
    for place in document_places(dataset):
        if (name := name_at(dataset, place)) in names:
            found.setdefault(name, []).append(place)
    return found


def document_places(dataset: Dataset) -> Iterator[DocumentPlace]:
    """Yield the documents of a dataset."""
    for split in dataset.splits:
        for source, stream in enumerate(dataset.streams(split)):
            starts = stream.document_starts().tolist()
            for number, (start, stop) in enumerate(pairwise(starts)):
                yield DocumentPlace(split, source, start, stop, number)


def _has_same_tokenizer(before: Dataset, after: Dataset) -> bool:
    digests = {one.manifest["tokenizer"]["xxh3"] for one in (before, after)}
    return len(digests) == 1 and before.dtype == after.dtype


def _places_by_digest(dataset: Dataset, *, by_text: bool) -> dict[Any, list[DocumentPlace]]:
    found: dict[Any, list[DocumentPlace]] = {}
    for place in document_places(dataset):
        key: Any = name_at(dataset, place) if by_text else _token_digest(dataset, place)
        found.setdefault(key, []).append(place)
    return found


def _token_digest(dataset: Dataset, place: DocumentPlace) -> int:
    tokens = dataset.streams(place.split)[place.source].read(place.start, place.stop)
    return xxh3_128_intdigest(tokens.tobytes() + _features(dataset, place).tobytes())


def name_at(dataset: Dataset, place: DocumentPlace) -> str:
    """Return the name of the document at a place, from its text, and from its features."""
    text, features = text_at(dataset, place), _features(dataset, place)
    if len(features):
        return document_name(*hash_media(text, features))
    return document_name(*hash_document(text)[:2])


def _features(dataset: Dataset, place: DocumentPlace) -> NDArray[np.uint8]:
    """Empty for a text."""
    stream = dataset.streams(place.split)[place.source]
    return stream.read_features(place.document) if stream.has_features else np.zeros(0, np.uint8)


def text_at(dataset: Dataset, place: DocumentPlace) -> str:
    """Return the text of the document at a place."""
    tokens = dataset.streams(place.split)[place.source].read(place.start, place.stop).tolist()
    around = {dataset.end, dataset.begin}
    ids = tokens[1 if tokens[0] in around else 0 : -1 if tokens[-1] in around else None]
    tokenizer = _tokenizer(str(dataset.tokenizer_path))
    return str(tokenizer.decode(ids, skip_special_tokens=False))


@lru_cache(maxsize=4)
def _tokenizer(path: str) -> Any:
    return load_tokenizer(Path(path))


def causes_in(dataset: Dataset, names: set[str]) -> dict[str, dict[str, Any]]:
    """Return what the list of left-out documents says of some of them; empty without a list.
    Raises DataError for a damaged one."""
    path = dataset.folder / REMOVED
    if not path.exists():
        return {}
    if is_list_damaged(dataset):
        raise DataError(
            "its bytes are not what was written",
            where=str(path),
            remedy="run holdfast data prepare, which writes it again",
        )
    with path.open("rb") as file:
        entries = (parse_json(line) for line in file)
        return {entry["document"]: entry for entry in entries if entry["document"] in names}
