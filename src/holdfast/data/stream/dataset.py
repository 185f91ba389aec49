"""A prepared dataset, opened: token streams over memory-mapped shards, and what is known of them.

The manifest is the dataset's identity. Its `version` is the hash of everything else in it. It holds
a checksum of every other file. So one name stands for all bytes.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from copy import copy
from itertools import pairwise
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from holdfast.core.json_parsing import parse_json
from holdfast.data.order.document_order import DocumentOrder
from holdfast.data.read.chat_templates import TEMPLATE_FILE
from holdfast.data.read.files import canonical_json, checksum, file_checksum
from holdfast.data.read.preference_rows import DOCUMENTS
from holdfast.data.stream.node_cache import NodeCache
from holdfast.data.stream.shards import Shard, ShardFile
from holdfast.errors import DataError

FORMAT = 7
"""The newest format that this program reads, of images and recordings. A dataset of texts without
stages is written in format 1."""
FORMAT_OF_SCORES = 6
FORMAT_OF_STAGES = 5
"""The format of datasets with stages, of which none is `score`."""
FORMAT_OF_PREFERENCES = 4
FORMAT_OF_WEIGHTS = 3
"""The first format whose masks have weights of targets."""

MANIFEST = "manifest.json"
REMOVED = "removed.jsonl"
"""The documents that stages left out, of a dataset with stages."""
RECIPE = "recipe.yaml"
"""A run file with the settings that the dataset was prepared by. It is no part of the identity."""
SOURCES = "sources.json"
"""The paths that the sources had. They are no part of the identity; older datasets have none."""

MAPPED_FILES = 128
"""Files of a stream that stay mapped, of a dataset with an address. A file that was removed takes
up disk as long as a process maps it."""
REMAKE_REMEDY = "remove the folder and run holdfast data prepare again"


class CachedArrays(Sequence[NDArray[Any]]):
    """Files as arrays, each fetched and mapped when it is first used. A few stay mapped."""

    def __init__(self, cache: NodeCache, files: Sequence[ShardFile], dtype: np.dtype[Any]):
        self._cache, self._files, self._dtype = cache, files, dtype
        self._mapped: OrderedDict[int, NDArray[Any]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._files)

    @overload
    def __getitem__(self, index: int) -> NDArray[Any]: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[NDArray[Any]]: ...

    def __getitem__(self, index: int | slice) -> NDArray[Any] | Sequence[NDArray[Any]]:
        if isinstance(index, slice):
            return CachedArrays(self._cache, self._files[index], self._dtype)
        with self._lock:
            if (found := self._mapped.get(index)) is not None:
                self._mapped.move_to_end(index)
                return found
        if index >= len(self._files):
            raise IndexError(index)
        array = self._cache.map(self._files[index], self._dtype)
        with self._lock:
            self._mapped[index] = array
            while len(self._mapped) > MAPPED_FILES:
                self._mapped.popitem(last=False)
        return array


class TokenStream:
    """Packed tokens of one source and split, over all its shards: shape [tokens]. cache: fetches
    the shards that are not in the folder yet. rows: as in `data.sources.*.rows`."""

    def __init__(
        self,
        folder: Path,
        shards: Sequence[Shard],
        dtype: str,
        cache: NodeCache | None = None,
        rows: str = "text",
    ):
        self.shards, self.rows = tuple(shards), rows
        self.dtype = np.dtype(dtype) if shards else np.dtype("<u2")
        self._folder, self._cache = folder, cache
        files = [s.token_file(self.dtype) for s in shards]
        self._arrays = self._map(files, self.dtype)
        masks = [s.mask_file for s in shards if s.mask_xxh3]
        self._masks = self._map(masks, np.dtype(np.uint8))
        features = [s.features_file for s in shards if s.features_xxh3]
        self._features = self._map(features, np.dtype(np.uint8))
        self._starts = np.cumsum([0, *(s.tokens for s in shards)])
        self._document_ends = np.cumsum([s.documents for s in shards])
        self.tokens = int(self._starts[-1])
        self.documents = sum(s.documents for s in shards)
        self._order: DocumentOrder | None = None

    def ordered(self, scores: NDArray[np.float64]) -> TokenStream:
        """Return the stream with its documents by their scores [documents], the lowest first. Only
        `read`, `files_with` and `position` know of the order."""
        other = copy(self)
        other._order = DocumentOrder(self.document_starts(), scores)
        return other

    def position(self, start: int) -> int:
        """Return where `read` finds the document that begins at token `start` of the dataset."""
        return start if self._order is None else self._order.position(start)

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Tokens [start, stop), clipped to the stream, in the shards' own type."""
        if self._order is None:
            return self._read(self._arrays, start, stop, self.dtype)
        ranges = self._order.ranges(np.array([start]), np.array([stop]))
        pieces = [
            self._read(self._arrays, begin, end, self.dtype)
            for begin, end in zip(*(each.tolist() for each in ranges), strict=True)
        ]
        return np.concatenate(pieces) if pieces else np.zeros(0, dtype=self.dtype)

    def read_shards(self) -> Iterator[NDArray[Any]]:
        """Yield the tokens of each shard. A shard ends with the end of a document."""
        for start, stop in pairwise(self._starts.tolist()):
            yield self.read(start, stop)

    def read_mask(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Of chat data: 1 for tokens that carry loss, 0 for the rest, clipped to the stream."""
        return self._read(self._masks, start, stop, np.dtype(np.uint8))

    def read_features(self, document: int) -> NDArray[Any]:
        """The numbers of a document's image or recording, as they are stored: [bytes], uint8."""
        shard = int(np.searchsorted(self._document_ends, document, side="right"))
        size = self.shards[shard].feature_bytes
        last = int(self._document_ends[shard]) - document
        at = (self.shards[shard].documents - last) * size
        return self._features[shard][at : at + size]

    def feature_files_with(self, documents: NDArray[np.int64]) -> list[ShardFile]:
        """The files with the features of these documents."""
        chosen = np.unique(np.searchsorted(self._document_ends, documents, side="right"))
        return [self.shards[i].features_file for i in chosen.tolist()]

    def document_starts(self) -> NDArray[np.int64]:
        """The first token of each document, and the stream's length: [documents + 1]."""
        starts = [np.zeros(1, dtype=np.int64)]
        for shard, base in zip(self.shards, self._starts.tolist(), strict=False):
            index = self._map([shard.index_file], np.dtype("<u8"))[0].astype(np.int64)
            starts.append(index[1:] + base)
        return np.concatenate(starts)

    def document_values(self) -> NDArray[np.float32] | None:
        """Labels of documents, margins of their pairs, or scores of texts: [documents]. None if it
        has none."""
        files = [shard.values_file for shard in self.shards if shard.values_xxh3]
        return np.concatenate(list(self._map(files, np.dtype("<f4")))) if files else None

    @property
    def is_chat(self) -> bool:
        return bool(self._masks)

    @property
    def has_features(self) -> bool:
        return bool(self._features)

    @property
    def has_values(self) -> bool:
        return any(shard.values_xxh3 for shard in self.shards)

    @property
    def documents_per_row(self) -> int:
        return DOCUMENTS.get(self.rows, 1)

    @property
    def is_preference(self) -> bool:
        return self.rows in DOCUMENTS

    def largest_token(self) -> int:
        """The largest id; 0 of an empty stream. Reads all of it."""
        return max((int(array.max()) for array in self._arrays), default=0)

    @property
    def files(self) -> list[ShardFile]:
        """The files that samples are read from."""
        tokens = [s.token_file(self.dtype) for s in self.shards]
        return tokens + [s.mask_file for s in self.shards if s.mask_xxh3]

    def files_with(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> list[ShardFile]:
        """The files with the tokens of any of the ranges [start, stop)."""
        if self._order is not None:
            starts, stops = self._order.ranges(starts, stops)
        last = self.tokens - 1
        used = np.zeros(len(self.shards) + 1, dtype=np.int64)
        for at, change in ((np.minimum(starts, last), 1), (np.minimum(stops - 1, last), -1)):
            shard = np.searchsorted(self._starts, at, side="right") - (1 if change > 0 else 0)
            np.add.at(used, shard, change)
        chosen = np.flatnonzero(np.cumsum(used)[:-1])
        return [self.shards[i].token_file(self.dtype) for i in chosen.tolist()]

    def _map(self, files: Sequence[ShardFile], dtype: np.dtype[Any]) -> Sequence[NDArray[Any]]:
        if self._cache is not None:
            return CachedArrays(self._cache, files, dtype)
        return [np.memmap(self._folder / file.path, dtype=dtype, mode="r") for file in files]

    def _read(
        self, arrays: Sequence[NDArray[Any]], start: int, stop: int, dtype: np.dtype[Any]
    ) -> NDArray[Any]:
        stop = min(stop, self.tokens)
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        pieces = []
        while start < stop:
            base = int(self._starts[first])
            end = min(stop, int(self._starts[first + 1]))
            pieces.append(arrays[first][start - base : end - base])
            start, first = end, first + 1
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces) if pieces else np.zeros(0, dtype=dtype)


class Dataset:
    """A dataset that `holdfast data prepare` wrote. Open it with `Dataset.open(folder)`.

    location: its folder, or its address; place: the same without options, for messages. cache: of
    a dataset with an address, what this node has of it; `folder` is then the cache's."""

    def __init__(self, folder: Path, manifest: dict[str, Any], cache: NodeCache | None = None):
        self.folder = folder
        self.cache = cache
        self.location = str(folder) if cache is None else cache.location
        self.place = str(folder) if cache is None else cache.where
        self.manifest = manifest
        self.version: str = manifest["version"]
        self.vocab_size: int = manifest["tokenizer"]["vocab_size"]
        self.dtype: np.dtype[Any] = np.dtype(manifest["tokenizer"]["dtype"])
        self.end: int = manifest["tokenizer"]["end"]
        self.begin: int | None = manifest["tokenizer"].get("begin")
        self.source_names: tuple[str, ...] = tuple(s["name"] for s in manifest["sources"])
        written = tuple(s["path"] for s in manifest["settings"]["sources"])
        paths = _read_source_paths(folder, len(written))
        self.source_paths: tuple[str | None, ...] = paths[0] if paths else written
        self.source_places: tuple[str | None, ...] = paths[1] if paths else (None,) * len(written)
        self.function_files: tuple[str | None, ...] = paths[2] if paths else ()
        self.former_version = _version_with_paths(manifest, self.source_paths)
        forms = [source.get("rows", "text") for source in manifest["settings"]["sources"]]
        self._streams = {
            split: tuple(
                TokenStream(folder, [Shard(**s) for s in shards], self.dtype.str, cache, rows)
                for shards, rows in zip(by_source, forms, strict=True)
            )
            for split, by_source in manifest["shards"].items()
        }

    @property
    def tokenizer_path(self) -> Path:
        return self.folder / "tokenizer.json"

    def is_version(self, version: str) -> bool:
        """Return True for this dataset's name, or the one that it had when paths belonged to it."""
        return version in (self.version, self.former_version)

    @property
    def baselines(self) -> dict[str, Any] | None:
        """Bits per byte of unigram and bigram counts; None without a validation split."""
        found: dict[str, Any] | None = self.manifest["baselines"]
        return found

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self._streams)

    def streams(self, split: str) -> tuple[TokenStream, ...]:
        """One stream per source, in the order of `source_names`."""
        return self._streams[split]

    def counts(self, split: str) -> dict[str, int]:
        """documents, tokens (end tokens included) and bytes of text."""
        found: dict[str, int] = self.manifest["splits"][split]
        return found

    def tokens_per_byte(self, split: str) -> float:
        """Text tokens per byte of text: turns nats per token into bits per byte. Of chat data the
        tokens that carry loss count, and the text that they stand for."""
        counts = self.counts(split)
        if "targets" in counts:
            return counts["targets"] / max(counts["target_bytes"], 1)
        around = 1 if self.begin is None else 2  # end tokens, and begin tokens
        return (counts["tokens"] - around * counts["documents"]) / max(counts["bytes"], 1)

    def shards(self) -> list[Shard]:
        return [s for by in self._streams.values() for stream in by for s in stream.shards]

    def files(self) -> list[ShardFile]:
        """The files of all shards."""
        return [file for shard in self.shards() for file in shard.files(self.dtype)]

    def path(self, file: ShardFile) -> Path:
        """The place of a shard's file, which is fetched if this node has it not yet."""
        return self.folder / file.path if self.cache is None else self.cache.path(file)

    @staticmethod
    def open(folder: str | Path, cache: NodeCache | None = None) -> Dataset:
        """Map a dataset. Raises DataError when there is none, when its manifest or tokenizer is
        not what was written, or when a shard has another size. (Shards' bytes: `verify`.)"""
        folder = Path(folder)
        manifest = read_manifest(folder)
        if file_checksum_or_none(folder / "tokenizer.json") != manifest["tokenizer"]["xxh3"]:
            raise DataError(
                "the tokenizer is missing or is not the one the tokens were made with",
                where=str(folder / "tokenizer.json"),
                remedy=REMAKE_REMEDY,
            )
        template = manifest.get("chat", {}).get("template")
        if template and file_checksum_or_none(folder / TEMPLATE_FILE) != template:
            raise DataError(
                "the chat template is missing or is not the one the rows were made with",
                where=str(folder / TEMPLATE_FILE),
                remedy=REMAKE_REMEDY,
            )
        if cache is not None:  # it checks what it fetches
            return Dataset(folder, manifest, cache)
        dtype = np.dtype(manifest["tokenizer"]["dtype"])
        for by_source in manifest["shards"].values():
            for shard in (Shard(**s) for shards in by_source for s in shards):
                for file in shard.files(dtype):
                    path = folder / file.path
                    found = path.stat().st_size if path.exists() else None
                    if found != file.bytes:
                        state = "is missing" if found is None else f"has {found:,} bytes"
                        raise DataError(
                            f"the shard {state}, it was written with {file.bytes:,}",
                            where=str(path),
                            remedy=REMAKE_REMEDY,
                        )
        return Dataset(folder, manifest)


def exists(folder: str | Path) -> bool:
    return (Path(folder) / MANIFEST).exists()


def with_version(content: dict[str, Any]) -> dict[str, Any]:
    """The manifest with its version: sha256 of the canonical JSON of everything else."""
    bare = {k: v for k, v in content.items() if k != "version"}
    return {**bare, "version": hashlib.sha256(canonical_json(bare)).hexdigest()[:32]}


def with_paths_checksum(places: dict[str, Any]) -> dict[str, Any]:
    """The content of `sources.json`, with a checksum of its own."""
    return {**places, "xxh3": checksum(canonical_json(places))}


def with_recipe_checksum(text: str) -> str:
    """The content of `recipe.yaml`, with a checksum of the lines above in its last one."""
    return f"{text}# {checksum(text.encode())}\n"


def _read_source_paths(
    folder: Path, sources: int
) -> tuple[tuple[str | None, ...], tuple[str | None, ...], tuple[str | None, ...]] | None:
    """(paths, places) of the sources, and files of the stages' functions; None if the dataset is
    older than the file."""
    path = folder / SOURCES
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        found = parse_json(raw)
        places = {key: found[key] for key in ("paths", "places")}
        sound = all(len(value) == sources for value in places.values())
        places |= {key: found[key] for key in ("functions",) if key in found}
        sound = sound and canonical_json(with_paths_checksum(places)) == raw
    except (ValueError, KeyError, TypeError):
        sound = False
    if not sound:
        raise DataError("the file is not what was written", where=str(path), remedy=REMAKE_REMEDY)
    return tuple(places["paths"]), tuple(places["places"]), tuple(places.get("functions", ()))


def _version_with_paths(manifest: dict[str, Any], paths: Sequence[str | None]) -> str:
    """The version as it was computed while the sources' paths belonged to a dataset's identity."""
    settings = manifest["settings"]

    def filled(sources: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**s, "path": path} for s, path in zip(sources, paths, strict=True)]

    former = {
        **manifest,
        "settings": {**settings, "sources": filled(settings["sources"])},
        "sources": filled(manifest["sources"]),
    }
    return str(with_version(former)["version"])


def read_manifest(folder: Path) -> dict[str, Any]:
    """Raises DataError when it is missing, newer than this program, or changed by one byte."""
    path = folder / MANIFEST
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise DataError(
            "there is no prepared dataset", where=str(folder), remedy="run holdfast data prepare"
        ) from None
    return parse_manifest(raw, str(path))


def parse_manifest(raw: bytes, where: str) -> dict[str, Any]:
    """Raises DataError when it is newer than this program, or changed by one byte."""
    try:
        manifest: dict[str, Any] = parse_json(raw)
        newer = manifest["format"] > FORMAT
        sound = with_version(manifest) == manifest and canonical_json(manifest) == raw
    except (ValueError, KeyError, TypeError, AttributeError):
        newer, sound = False, False
    if newer:
        raise DataError(
            f"format {manifest['format']} is newer than this program's ({FORMAT})",
            where=where,
            remedy="use a newer holdfast",
        )
    if not sound:
        raise DataError("the manifest is not what was written", where=where, remedy=REMAKE_REMEDY)
    return manifest


def file_checksum_or_none(path: Path) -> str | None:
    try:
        return file_checksum(path)
    except FileNotFoundError:
        return None
