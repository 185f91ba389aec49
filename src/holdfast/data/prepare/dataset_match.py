"""Compares a prepared dataset with the data section of a run file: is it what would be made?

A dataset's identity is its content. The paths that its sources had are not a part of it: they lie
in `sources.json` next to the manifest. If a run file names other paths, the documents there are
read and compared by their hashes.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import yaml
from xxhash import xxh3_128

from holdfast.config.loading.fields import change_of
from holdfast.config.sections.base import Change
from holdfast.config.sections.data import DataConfig, SourceConfig
from holdfast.core.data.special_tokens import KNOWN_ENDS
from holdfast.data.filters.plain import hash_document
from holdfast.data.prepare.stage_files import FOUND, locate_functions
from holdfast.data.prepare.stage_recipes import stage_recipes, without_found
from holdfast.data.read import vocabulary
from holdfast.data.read.chat_documents import ChatFormat
from holdfast.data.read.chat_format import chat_settings, read_chat_format
from holdfast.data.read.chat_templates import TOOL_USE
from holdfast.data.read.features import FeatureFormat
from holdfast.data.read.files import checksum, file_checksum
from holdfast.data.read.source_files import TOKEN_KIND
from holdfast.data.read.sources import plan_source, read_unit, source_files, source_names
from holdfast.data.stream.dataset import MANIFEST, Dataset, with_recipe_checksum
from holdfast.data.stream.dataset_location import is_address
from holdfast.errors import DataError

COMPARED_BYTES = 64 << 20
"""A larger source that was written since its preparation is not read again to compare it."""


def content_settings(config: DataConfig) -> dict[str, Any]:
    """Return the part of the run file that decides the content of a dataset (paths, weights,
    processes and the length of a sample do not)."""
    tokenizer: dict[str, Any]
    if config.tokenizer.place is None:
        tokenizer = {
            "vocab_size": config.tokenizer.vocab_size,
            "sample_bytes": config.tokenizer.sample_bytes,
        }
    else:
        path = vocabulary.tokenizer_file(config.tokenizer.place)
        loaded = vocabulary.load_tokenizer(path)
        known = vocabulary.describe_tokenizer(loaded, path)
        tokenizer = {"xxh3": file_checksum(path)}
        if known.end_token != next((t for t in KNOWN_ENDS if t in loaded.get_vocab()), None):
            tokenizer["end_token"] = known.end_token  # said by the files next to it
        if known.begin_id is not None:
            tokenizer["begin"] = known.begin_id
    names = source_names(config.sources)
    settings: dict[str, Any] = {
        "sources": [
            {"kind": s.kind, "name": n, "path": None, "field": s.field, "split": s.split}
            | ({"rows": s.rows} if s.is_chat else {})
            | ({"skips_above": config.max_document_bytes} if s.bad_rows == "skip" else {})
            | ({"media": s.media} if s.media else {})
            for s, n in zip(config.sources, names, strict=True)
        ],
        "tokenizer": tokenizer,
        "validation_fraction": config.validation_fraction,
    }
    if config.deduplicate is not True:  # without the key: as before there was one
        settings["deduplicate"] = config.deduplicate
    if (chat := read_chat_format(config)) is not None:
        settings["chat"] = chat_settings(chat)
    if config.stages:
        settings["stages"] = stage_recipes(config)
    if (features := FeatureFormat.of(config.features)) is not None:
        settings["features"] = features.settings()
    return settings


def source_places(config: DataConfig) -> dict[str, Any]:
    """Return the paths of the sources: as they are written, and where they lie."""
    found: dict[str, Any] = {
        "paths": [source.path for source in config.sources],
        "places": [_real_place(source) for source in config.sources],
    }
    if any(functions := locate_functions(config)):
        found["functions"] = functions
    return found


def describe_recipe(config: DataConfig) -> str:
    """Return a run file that prepares the same dataset, with the places of all files. What this
    machine decides, such as the number of processes, is not in it."""
    free = {
        name for name in type(config).model_fields if change_of(f"data.{name}") is Change.IN_PLACE
    }
    data = config.model_dump(mode="json", exclude_defaults=True, exclude=free)
    data["sources"] = [
        source.model_dump(mode="json", exclude_defaults=True)
        | {"kind": source.kind}
        | ({} if source.path is None else {"path": _real_place(source)})
        for source in config.sources
    ]
    if config.tokenizer.place is not None:
        data["tokenizer"]["path"] = os.path.realpath(config.tokenizer.place)
    for entry, stage in zip(data.get("stages", ()), config.stages, strict=True):
        if stage.function is not None:
            file, name = stage.place
            entry["function"] = f"{os.path.realpath(file)}:{name}"
        for text, known in zip(entry.get("texts", ()), stage.texts, strict=True):
            text |= {"path": os.path.realpath(known.place), "name": known.label}
    values = {"data": {"folder": "rebuilt", **data}}
    head = (
        "# Prepares the same version elsewhere: holdfast data prepare THIS_FILE data.folder=NEW\n"
    )
    return with_recipe_checksum(head + yaml.safe_dump(values, sort_keys=False, allow_unicode=True))


def _real_place(source: SourceConfig) -> str | None:
    if source.place is None:
        return None
    place = os.path.expanduser(source.place)
    return source.place if source.kind == "huggingface" else os.path.realpath(place)


def check_settings_match(
    dataset: Dataset,
    wanted: dict[str, Any],
    config: DataConfig,
    fetch: Callable[[int], SourceConfig],
) -> None:
    """Raises DataError when a dataset was made from other settings than the run file's. fetch:
    brings a source that lies elsewhere to this node, to be compared; it may raise StoreError."""
    made = dataset.manifest["settings"]
    if config.tokenizer.place is not None:
        check_tokenizer_match(dataset, vocabulary.tokenizer_file(config.tokenizer.place))
    made_sources = [{**source, "path": None} for source in made["sources"]]
    for key, before in (
        ("sources", made_sources),
        ("tokenizer", made["tokenizer"]),
        ("validation_fraction", made["validation_fraction"]),
        ("deduplicate", made.get("deduplicate", True)),
        ("chat", made.get("chat", True)),
        ("features", made.get("features", True)),
    ):
        if key == "tokenizer" and config.tokenizer.place is not None:
            continue
        now = wanted.get(key, True)
        if isinstance(now, dict) and isinstance(before, dict) and key == "chat":
            # An older program rendered rows with tools by the default template, too.
            now = {name: now[name] for name in now if name in before or name != TOOL_USE}
        if before != now:
            raise DataError(
                f"the dataset there was prepared with another data.{key} "
                f"({_without_paths(before)}, not {_without_paths(now)})",
                where=dataset.place,
                remedy="name another data.folder, or remove this one",
            )
    _check_stages_match(dataset, wanted)
    # Raises DataError if a source lies elsewhere and holds something else.
    for index, source in enumerate(config.sources):
        path, place = dataset.source_paths[index], dataset.source_places[index]
        if source.path == path or (place is not None and _real_place(source) == place):
            continue
        if is_address(source.path or "") and _bucket(source.path) == _bucket(path):
            continue  # only how the address is reached differs
        chat = read_chat_format(config)
        if not _holds_the_same(dataset, config, index, chat, fetch(index)):
            raise DataError(
                f"the dataset there was prepared with another data.sources "
                f"({path or 'no path'}, not {source.path or 'no path'}, which holds other text)",
                where=dataset.place,
                remedy="name another data.folder, or remove this one",
            )


def _bucket(address: str | None) -> tuple[str, list[str]]:
    """Return an address without its options, and the endpoint, which is another service's."""
    where, _, options = (address or "").partition("?")
    return where, parse_qs(options).get("endpoint", [])


def _check_stages_match(dataset: Dataset, wanted: dict[str, Any]) -> None:
    """Raises DataError for another list of stages; names the first one that differs."""
    made = without_found(dataset.manifest["settings"].get("stages", []))
    now = without_found(wanted.get("stages", []))
    for index, (before, after) in enumerate(zip_longest(made, now)):
        if before == after:
            continue
        if before is None or after is None:
            found = "no such stage" if before is None else json.dumps(before)
            asked = "none" if after is None else json.dumps(after)
        else:  # the keys that differ say enough of a long entry
            keys = [k for k in {**before, **after} if before.get(k) != after.get(k)]
            found, asked = (json.dumps({k: r.get(k) for k in keys}) for r in (before, after))
        raise DataError(
            f"the dataset there was prepared with another data.stages[{index}] "
            f"({found}, not {asked})",
            where=dataset.place,
            remedy="name another data.folder, or remove this one",
        )


def changed_code(dataset: Dataset, wanted: dict[str, Any]) -> list[str]:
    """Return the stages whose code or files are no longer those of the preparation. A file that is
    not there any more has not changed: a dataset stands for itself."""
    made = dataset.manifest["settings"].get("stages", [])
    changed = []
    for index, (before, after) in enumerate(zip(made, wanted.get("stages", []), strict=True)):
        keys = [
            key for key in FOUND if after.get(key) is not None and before.get(key) != after[key]
        ]
        if keys:
            changed.append(f"data.stages[{index}] ({after['kind']}: {', '.join(keys)})")
    return changed


def _without_paths(value: Any) -> str:
    if isinstance(value, list):
        value = [{k: v for k, v in one.items() if k != "path"} for one in value]
    return json.dumps(value)


def _holds_the_same(
    dataset: Dataset, config: DataConfig, index: int, chat: ChatFormat | None, source: SourceConfig
) -> bool:
    """Return True if a source, as it lies here, has just the documents that the dataset was made
    from."""
    made = dataset.manifest["sources"][index]
    files, limit = source_files(source, index), config.max_document_bytes
    if (len(files), sum(size for _, size in files)) != (made["files"], made["bytes"]):
        return False
    rows = array("Q")
    try:
        tokenizer, features = config.tokenizer.place, FeatureFormat.of(config.features)
        for unit in plan_source(source, index, 0, chat, tokenizer, features).units:
            for text in read_unit(unit, limit, xxh3_128()):
                rows.extend(hash_document(text))
    except DataError:
        return False
    return checksum(rows.tobytes()) == str(made["xxh3"])


def needed_vocabulary(dataset: Dataset) -> int:
    """Rows that a model needs for a dataset's tokens: the largest id that can occur + 1."""
    needed = vocabulary.needed_size(dataset.tokenizer_path, dataset.end, dataset.begin)
    kinds = [source["kind"] for source in dataset.manifest["settings"]["sources"]]
    for split in dataset.splits:
        for kind, stream in zip(kinds, dataset.streams(split), strict=True):
            # A template and a token shard have special tokens, which no text becomes.
            if stream.is_chat or kind == TOKEN_KIND:
                needed = max(needed, stream.largest_token() + 1)
    return needed


def changed_sources(config: DataConfig, dataset: Dataset) -> list[str]:
    """Sources whose files are more, fewer or of another size than when they were read, or were
    written since and hold other text. One that is not there any more has not changed: a dataset
    stands for itself."""
    changed, prepared = [], (dataset.folder / MANIFEST).stat().st_mtime_ns
    for index, (source, made) in enumerate(
        zip(config.sources, dataset.manifest["sources"], strict=True)
    ):
        files = source_files(source, index)
        size = sum(size for _, size in files)
        if files and (len(files), size) != (made["files"], made["bytes"]):
            changed.append(
                f"{made['name']}: {made['files']:,} files of {made['bytes']:,} bytes then, "
                f"{len(files):,} of {size:,} now"
            )
            continue
        is_small = size <= COMPARED_BYTES
        late = [path for path, _ in files if _written(path, is_small) > prepared]
        chat = read_chat_format(config)
        if late and not (is_small and _holds_the_same(dataset, config, index, chat, source)):
            changed.append(f"{made['name']}: {late[0]} was written since")
    return changed


def _written(path: str, with_moves: bool) -> int:
    """When a file was written, in ns; with_moves: or put in its place, or copied."""
    state = os.stat(path)
    return max(state.st_mtime_ns, state.st_ctime_ns) if with_moves else state.st_mtime_ns


def check_tokenizer_match(dataset: Dataset, path: Path) -> None:
    """Raises DataError when a tokenizer.json gives tokens other meanings than the dataset's."""
    if difference := vocabulary.describe_difference(path, dataset.tokenizer_path):
        raise DataError(
            f"{path} does not match the dataset in {dataset.place}: {difference}",
            where="data.tokenizer.path",
            remedy=f"use {dataset.tokenizer_path}, or name another data.folder",
        )
