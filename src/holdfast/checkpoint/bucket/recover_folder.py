"""Bring a run back from its bucket into an empty run folder."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.checkpoint.bucket import fencing
from holdfast.checkpoint.bucket.copy import copy_checkpoint
from holdfast.checkpoint.restore.catalog import list_commits, step_of
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.checkpoint.save import retention
from holdfast.errors import CheckpointError, CorruptError, HoldfastError, OtherKeyError, StoreError
from holdfast.wire.store.location import UnfitStoreError, open_store, probe_store
from holdfast.wire.store.run_store import MissingKeyError, RunStore


def open_bucket(location: str) -> RunStore:
    """The bucket of a location, probed. Raises StoreError."""
    store = open_store(location)
    probe_store(store, location.partition("?")[0])
    return store


def recover_folder(
    folder: RunStore, location: str, config_hash: str, is_fresh: bool, say: Callable[[str], None]
) -> RunStore | None:
    """Copy the bucket's newest intact checkpoint into a run folder that has none so new. Return the
    bucket if it can be reached. Checkpoints that a later generation left behind do not count in
    either.

    Raises CheckpointError when the bucket belongs to another run, or `fresh` asks for a beginning
    although there are checkpoints. Raises StoreError for an unfit location or server. Raises it
    also if the folder has no checkpoint and the bucket is out of reach. A run that then began at
    step 0 would lose the bucket's checkpoints.
    """
    held = list_commits(folder)
    here = max(map(step_of, set(held) - fencing.superseded_keys(folder, held)), default=-1)
    bucket = open_store(location)
    try:
        probe_store(bucket, location.partition("?")[0])
        there = list_commits(bucket)
    except UnfitStoreError:
        raise
    except StoreError as error:
        if here < 0 and not is_fresh:
            raise
        say(f"the run continues without its bucket for now: {error}")
        return None
    if is_fresh and there:
        raise CheckpointError(
            f"holds checkpoints of the run that is set aside (step {step_of(there[0])})",
            where="checkpoint.bucket",
            remedy="name another prefix",
        )
    try:
        _recover_newest(folder, bucket, [k for k in there if step_of(k) > here], config_hash, say)
    except StoreError as error:
        if here < 0:
            raise
        say(f"the run continues without its bucket for now: {error}")
        return None
    return bucket


def _recover_newest(
    folder: RunStore,
    bucket: RunStore,
    keys: list[str],
    config_hash: str,
    say: Callable[[str], None],
) -> None:
    """Bring back the first intact checkpoint. Raises OtherKeyError if none is intact and one names
    another key: then the key is wrong, rather than the object."""
    unopened: OtherKeyError | None = None
    nothing = fencing.superseded_keys(bucket, keys)
    for key in keys:
        if key in nothing:
            continue
        try:
            if _recover_checkpoint(folder, bucket, key, config_hash, say):
                return
        except OtherKeyError as error:
            unopened = unopened or error
            say(f"a checkpoint in the bucket cannot be trusted: {error}")
    if unopened is not None:
        raise unopened


def _recover_checkpoint(
    folder: RunStore, bucket: RunStore, key: str, config_hash: str, say: Callable[[str], None]
) -> bool:
    """Copy a checkpoint; return True if it is in the folder now. A broken one is reported and
    passed over."""
    try:
        commit = Checkpoint.open(bucket, key).commit
    except StoreError:
        raise
    except (HoldfastError, MissingKeyError) as error:
        say(f"a checkpoint in the bucket cannot be trusted: {error}")
        return False
    if commit.config_hash != config_hash:
        raise CheckpointError(
            "holds checkpoints of another run",
            where="checkpoint.bucket",
            remedy="name another prefix",
        )
    try:
        copied = copy_checkpoint(bucket, key, folder)
        fencing.copy_start_records(bucket, folder)
    except (CheckpointError, CorruptError, MissingKeyError) as error:
        say(f"a checkpoint in the bucket cannot be trusted: {error}")
        # it will never be complete
        retention.discard_uncommitted(folder, commit.generation, commit.step)
        return False
    say(f"step {copied.step} was brought back from the bucket")
    return True
