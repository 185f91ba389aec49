"""Is every byte of a dataset still what was written?"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from holdfast.core.data.permutation import Permutation
from holdfast.data.stream.dataset import (
    FORMAT_OF_WEIGHTS,
    RECIPE,
    REMAKE_REMEDY,
    REMOVED,
    Dataset,
    file_checksum_or_none,
    with_recipe_checksum,
)
from holdfast.data.stream.node_cache import NodeCache
from holdfast.data.stream.reference import REFERENCES, check_reference
from holdfast.data.stream.shards import Shard, ShardFile
from holdfast.errors import DataError

FULL_CHECK_BYTES = 1 << 30


def find_problems(folder: str | Path | Dataset) -> list[str]:
    """Every problem of a dataset, one sentence each; none when every byte is right.

    Checks the manifest's own hash, the tokenizer, and of each shard its checksum, its index, and
    that documents end where the index says. Checks reference log-probabilities, too. Of a dataset
    with an address, both the files there and those of this node are read. Raises StoreError for an
    address that fails.
    """
    try:
        dataset = folder if isinstance(folder, Dataset) else Dataset.open(folder)
    except DataError as error:
        return [str(error)]
    problems = [problem for shard in dataset.shards() for problem in _shard_changes(dataset, shard)]
    if not problems:
        problems = [p for shard in dataset.shards() for p in _shard_inconsistencies(dataset, shard)]
    if is_list_damaged(dataset):
        problems.append(
            f"{dataset.folder / REMOVED}: its bytes are not what was written: run holdfast data "
            "prepare, which writes it again"
        )
    recipe = dataset.folder / RECIPE
    if dataset.cache is None and recipe.exists():
        raw = recipe.read_bytes()
        above = b"".join(raw.splitlines(keepends=True)[:-1]).decode(errors="replace")
        if with_recipe_checksum(above).encode() != raw:
            problems.append(f"{recipe}: its bytes are not what was written")
    stored = sorted((dataset.folder / REFERENCES).glob("*"))
    return problems + [problem for folder in stored for problem in check_reference(folder)]


def is_list_damaged(dataset: Dataset) -> bool:
    """Return True if the list of what stages left out is lost, or is not what was written."""
    removed = dataset.manifest.get("stages", {}).get("removed")
    if not removed or dataset.cache is not None:
        return False
    return bool(file_checksum_or_none(dataset.folder / REMOVED) != removed["xxh3"])


def check_dataset(dataset: Dataset, limit: int = FULL_CHECK_BYTES) -> None:
    """Check a dataset at a start or resume; raise DataError naming the first changed file.

    Up to `limit` bytes of shards are hashed. That is all of a small dataset, or a selection from a
    larger one that depends on its version. (`open` has checked sizes and the manifest's own hash.)
    Of a dataset with an address, that is done with what this node has. A changed file is removed
    there, and fetched when it is needed.
    """
    shards = dataset.shards()
    order = Permutation(len(shards), int(dataset.version, 16))
    for i in range(len(shards)):
        shard = shards[order(i)]
        if dataset.cache is not None:
            files = shard.files(dataset.dtype)
            # Remove the changed ones of a shard's files. Return False if none is here.
            here = [file for file in files if dataset.cache.has(file)]
            for file in here:
                dataset.cache.remove_if_damaged(file)
            if not bool(here):
                continue
        elif problems := _shard_changes(dataset, shard):
            raise DataError(problems[0], remedy=REMAKE_REMEDY)
        limit -= shard.tokens * dataset.dtype.itemsize
        if limit <= 0:
            return


def _shard_changes(dataset: Dataset, shard: Shard) -> list[str]:
    if dataset.cache is not None:
        return _source_changes(dataset.cache, shard.files(dataset.dtype))
    return [
        f"{dataset.folder / file.path}: its bytes are not what was written"
        for file in shard.files(dataset.dtype)
        if file_checksum_or_none(dataset.folder / file.path) != file.xxh3
    ]


def _source_changes(cache: NodeCache, files: list[ShardFile]) -> list[str]:
    """Of files at an address; those that are not here are fetched, which checks them too."""
    problems = []
    for file in files:
        cache.remove_if_damaged(file)
        try:
            if cache.has(file):
                cache.check_source(file)
            else:
                cache.fetch(file)
        except DataError as error:
            problems.append(f"{cache.where}: {error.message}")
    return problems


def _shard_inconsistencies(dataset: Dataset, shard: Shard) -> list[str]:
    """A shard that was written wrongly: our own bug, were it ever to happen."""
    starts = np.fromfile(dataset.path(shard.index_file), dtype="<u8").astype(np.int64)
    path = dataset.path(shard.token_file(dataset.dtype))
    tokens = np.memmap(path, dataset.dtype, "r")
    if shard.mask_xxh3:  # documents end as the template ends them
        ends = np.sort(starts[1:])
        mask = np.fromfile(dataset.path(shard.mask_file), dtype=np.uint8)
        if int(mask.max()) > 1 and dataset.manifest["format"] < FORMAT_OF_WEIGHTS:
            return [f"{dataset.folder / shard.mask_path}: a weight is neither 0 nor 1"]
    else:
        ends = np.flatnonzero(tokens == dataset.end) + 1
    if not np.array_equal(ends, starts[1:]):
        return [f"{path}: documents do not end where the index says"]
    if int(tokens.max()) >= dataset.vocab_size:
        return [f"{path}: a token is outside the vocabulary"]
    return []
