"""Token shards: the results of many units, joined in order into a few large files.

A shard holds complete documents of one source and split, each ended by the end token. They are
plain little-endian integers: shape [tokens]. Next to it is its index, uint64 [documents + 1]: the
begin of each document in the shard, and the shard's length. A shard of chat data has a mask too,
uint8 [tokens]: 1 for a token that carries loss, 0 for any other. A shard of rated rows, or of
pairs with margins, has values, float32 [documents]. Documents of a pair are neighbours, and lie in
one shard. A shard of images or recordings has features: the numbers of each document, one after
the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.data.read.files import write_atomic
from holdfast.data.stages.unit_tasks import UnitTokens, read_tokens


@dataclass(frozen=True)
class ShardFile:
    """One file of a dataset, as its manifest knows it. path: relative to the dataset."""

    path: str
    bytes: int
    xxh3: str


@dataclass(frozen=True)
class Shard:
    """One pair of files; `path` is relative to the dataset's folder, the index is `.idx`. The mask,
    if there is one, is `.mask`, the values are `.val`, and the features `.feat`. feature_bytes: of
    a document's features."""

    path: str
    documents: int
    tokens: int
    xxh3: str
    index_xxh3: str
    mask_xxh3: str = ""
    values_xxh3: str = ""
    features_xxh3: str = ""
    feature_bytes: int = 0

    @property
    def index_path(self) -> str:
        return self._beside(".idx")

    @property
    def mask_path(self) -> str:
        return self._beside(".mask")

    @property
    def values_path(self) -> str:
        return self._beside(".val")

    def _beside(self, ending: str) -> str:
        return self.path.removesuffix(".bin") + ending

    def token_file(self, dtype: np.dtype[Any]) -> ShardFile:
        return ShardFile(self.path, self.tokens * dtype.itemsize, self.xxh3)

    @property
    def index_file(self) -> ShardFile:
        return ShardFile(self.index_path, (self.documents + 1) * 8, self.index_xxh3)

    @property
    def mask_file(self) -> ShardFile:
        return ShardFile(self.mask_path, self.tokens, self.mask_xxh3)

    @property
    def values_file(self) -> ShardFile:
        return ShardFile(self.values_path, self.documents * 4, self.values_xxh3)

    @property
    def features_file(self) -> ShardFile:
        size = self.documents * self.feature_bytes
        return ShardFile(self._beside(".feat"), size, self.features_xxh3)

    def files(self, dtype: np.dtype[Any]) -> list[ShardFile]:
        """All of its files. dtype: of its tokens."""
        found = [self.token_file(dtype), self.index_file]
        found += [self.mask_file] if self.mask_xxh3 else []
        found += [self.values_file] if self.values_xxh3 else []
        return found + ([self.features_file] if self.features_xxh3 else [])

    def to_json(self) -> dict[str, Any]:
        optional = ("mask_xxh3", "values_xxh3", "features_xxh3", "feature_bytes")
        return {key: said for key, said in asdict(self).items() if key not in optional or said}


def write_shards(
    folder: Path,
    split: str,
    source: int,
    results: Sequence[Path],
    shard_tokens: int,
    documents: int = 1,
) -> list[Shard]:
    """Join one source's unit results into shards of `shard_tokens` or a little more. A shard ends
    with the row that reaches the number. documents: of a row. Memory holds one unit at a time and
    the shard's index."""
    shards: list[Shard] = []
    pieces = _ShardCutter(results, split, shard_tokens, documents)
    while pieces.has_more():
        path = f"shards/{split}-{source:03d}-{len(shards):05d}.bin"
        lengths: list[NDArray[np.uint32]] = []
        masks: list[NDArray[np.uint8]] = []
        values: list[NDArray[np.float32]] = []
        features: list[NDArray[np.uint8]] = []
        tokens = _tokens(pieces.next_shard(), lengths, masks, values, features)
        digest = write_atomic(folder / path, tokens, sync=True)
        starts = np.zeros(1 + sum(len(n) for n in lengths), dtype="<u8")
        np.cumsum(np.concatenate(lengths), out=starts[1:])
        index = folder / (path.removesuffix(".bin") + ".idx")
        index_digest = write_atomic(index, [starts.tobytes()], sync=True)
        shard = Shard(path, len(starts) - 1, int(starts[-1]), digest, index_digest)
        if masks:
            mask = (piece.tobytes() for piece in masks)
            shard = replace(
                shard, mask_xxh3=write_atomic(folder / shard.mask_path, mask, sync=True)
            )
        if values:
            said = (piece.tobytes() for piece in values)
            digest = write_atomic(folder / shard.values_path, said, sync=True)
            shard = replace(shard, values_xxh3=digest)
        if features:
            bytes_of = (np.ascontiguousarray(piece).data for piece in features)
            path = shard.features_file.path
            digest = write_atomic(folder / path, bytes_of, sync=True)
            shard = replace(shard, features_xxh3=digest, feature_bytes=features[0].shape[1])
        shards.append(shard)
    return shards


def _tokens(
    pieces: Iterator[UnitTokens],
    lengths: list[NDArray[np.uint32]],
    masks: list[NDArray[np.uint8]],
    values: list[NDArray[np.float32]],
    features: list[NDArray[np.uint8]],
) -> Iterator[bytes]:
    for piece in pieces:
        lengths.append(piece.lengths)
        if piece.values is not None:
            values.append(piece.values)
        if piece.mask is not None:
            masks.append(piece.mask)
        if piece.features is not None:
            features.append(piece.features)
        yield piece.tokens.tobytes()


class _ShardCutter:
    """Hands out the documents of many units, cut where a shard is full."""

    def __init__(self, results: Sequence[Path], split: str, shard_tokens: int, row: int):
        self._results = iter(results)
        self._split = split
        self._limit, self._row = shard_tokens, row
        self._rest_of_unit: UnitTokens | None = None

    def has_more(self) -> bool:
        while self._rest_of_unit is None or not len(self._rest_of_unit.lengths):
            path = next(self._results, None)
            if path is None:
                return False
            self._rest_of_unit = read_tokens(path, self._split)
        return True

    def next_shard(self) -> Iterator[UnitTokens]:
        room = self._limit
        while room > 0 and self.has_more():
            assert self._rest_of_unit is not None
            rest = self._rest_of_unit
            # Two bytes of features take the place of a token.
            more = 0 if rest.features is None else rest.features.shape[1] // 2
            sizes = rest.lengths.astype(np.int64) + more
            ends = np.cumsum(sizes)[self._row - 1 :: self._row]
            rows = min(int(np.searchsorted(ends, room)) + 1, len(ends))
            room -= int(ends[rows - 1])
            piece, self._rest_of_unit = rest.cut(rows * self._row)
            yield piece
