"""Is every byte of a dataset still what was written?"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from holdfast.core.data.permutation import Permutation
from holdfast.data.dataset import FORMAT, REMAKE_REMEDY, Dataset, file_checksum_or_none
from holdfast.data.shards import Shard
from holdfast.errors import DataError

FULL_CHECK_BYTES = 1 << 30


def find_problems(folder: str | Path) -> list[str]:
    """Every problem of a dataset, one sentence each; none when every byte is right.

    Checks the manifest's own hash, the tokenizer, and of each shard its checksum, its index, and
    that documents end where the index says.
    """
    try:
        dataset = Dataset.open(folder)
    except DataError as error:
        return [str(error)]
    problems = [problem for shard in dataset.shards() for problem in _shard_changes(dataset, shard)]
    if not problems:
        problems = [p for shard in dataset.shards() for p in _shard_inconsistencies(dataset, shard)]
    return problems


def check_dataset(dataset: Dataset, limit: int = FULL_CHECK_BYTES) -> None:
    """Check a dataset at a start or resume; raise DataError naming the first changed file.

    Up to `limit` bytes of shards are hashed. That is all of a small dataset, or a selection from a
    larger one that depends on its version. (`open` has checked sizes and the manifest's own hash.)
    """
    shards = dataset.shards()
    order = Permutation(len(shards), int(dataset.version, 16))
    for i in range(len(shards)):
        shard = shards[order(i)]
        if problems := _shard_changes(dataset, shard):
            raise DataError(problems[0], remedy=REMAKE_REMEDY)
        limit -= (dataset.folder / shard.path).stat().st_size
        if limit <= 0:
            return


def _shard_changes(dataset: Dataset, shard: Shard) -> list[str]:
    return [
        f"{dataset.folder / path}: its bytes are not what was written"
        for path, digest in shard.checksums()
        if file_checksum_or_none(dataset.folder / path) != digest
    ]


def _shard_inconsistencies(dataset: Dataset, shard: Shard) -> list[str]:
    """A shard that was written wrongly: our own bug, were it ever to happen."""
    starts = np.fromfile(dataset.folder / shard.index_path, dtype="<u8").astype(np.int64)
    tokens = np.memmap(dataset.folder / shard.path, dataset.manifest["tokenizer"]["dtype"], "r")
    if shard.mask_xxh3:  # documents end as the template ends them
        ends = np.sort(starts[1:])
        mask = np.fromfile(dataset.folder / shard.mask_path, dtype=np.uint8)
        if int(mask.max()) > 1 and dataset.manifest["format"] < FORMAT:
            return [f"{dataset.folder / shard.mask_path}: a weight is neither 0 nor 1"]
    else:
        ends = np.flatnonzero(tokens == dataset.end) + 1
    if not np.array_equal(ends, starts[1:]):
        return [f"{dataset.folder / shard.path}: documents do not end where the index says"]
    if int(tokens.max()) >= dataset.vocab_size:
        return [f"{dataset.folder / shard.path}: a token is outside the vocabulary"]
    return []
