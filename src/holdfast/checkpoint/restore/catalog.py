"""Lists the checkpoints of a run store, newest first."""

from __future__ import annotations

from typing import Any

from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.core.format.manifest import COMMITS_PREFIX, parse_commit_key
from holdfast.errors import HoldfastError
from holdfast.wire.store.run_store import RunStore


def list_commits(store: RunStore) -> list[str]:
    """Keys of all commit objects: newest step first, of one step the newest generation first."""
    found = [(parse_commit_key(key), key) for key in store.list(COMMITS_PREFIX)]
    known = [(position, key) for position, key in found if position is not None]
    return [key for _, key in sorted(known, reverse=True)]


def step_of(key: str) -> int:
    """The step in a commit object's key; 0 for another key."""
    position = parse_commit_key(key)
    return position[0] if position else 0


def describe_checkpoint(store: RunStore, key: str) -> dict[str, Any]:
    """Return what `holdfast checkpoint list` prints of one checkpoint. Raises as `open` does."""
    commit = Checkpoint.open(store, key).commit
    return {
        "key": key,
        "step": commit.step,
        "generation": commit.generation,
        "bytes": commit.nbytes,
        "writers": len(commit.writers),
        "config_hash": commit.config_hash,
        "dataset_version": commit.dataset_version,
    }


def origin_of_weights(store: RunStore) -> str:
    """Name of the folder whose weights the run began with; "" if it began from initial ones."""
    for key in reversed(list_commits(store)):
        position = parse_commit_key(key)
        if position is None or position[1] != 0:  # generation 0: written before any membership
            continue
        try:
            return str(Checkpoint.open(store, key).commit.meta.get("imported_from", ""))
        except HoldfastError:
            return ""
    return ""
