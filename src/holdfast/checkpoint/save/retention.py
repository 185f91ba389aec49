"""Removal from the run store: checkpoints past their keep, and objects that no commit names.

The commit object is removed first, the bytes after it. So at every moment each existing commit
object is complete.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass

from holdfast.checkpoint.restore.catalog import list_commits
from holdfast.core.format.manifest import (
    blob_key,
    commit_key,
    data_prefix,
    parse_commit_key,
    parse_save_key,
    part_key,
    part_prefix,
    writer_name,
)
from holdfast.policy.saving.retention import removable_steps
from holdfast.wire.store.run_store import AlreadyExistsError, MissingKeyError, RunStore


@dataclass(frozen=True, slots=True)
class RetentionRules:
    """Retention as the run file has it."""

    keep_last: int
    keep_every: int = 0


KEPT_PREFIX = "kept/"
"""Objects without bytes: each names a step whose checkpoints a user keeps."""


KEPT_IN_SOURCE_PREFIX = "kept-in-source/"
"""The same in a bucket, of steps that the run folder keeps. Its uploader writes them."""


BEST_PREFIX = "best/"
"""Objects that name steps of checkpoint.keep_best. Each holds the validation loss as a number."""


def kept_steps(store: RunStore) -> set[int]:
    """Return the steps whose checkpoints stay, whatever the rules say."""
    prefixes = (KEPT_PREFIX, KEPT_IN_SOURCE_PREFIX, BEST_PREFIX)
    return set().union(*(_marked_steps(store, prefix) for prefix in prefixes))


def best_losses(store: RunStore) -> dict[int, float]:
    """Return the validation losses of the steps that checkpoint.keep_best keeps."""
    found = {}
    for step in _marked_steps(store, BEST_PREFIX):
        with suppress(MissingKeyError):  # a run at work has released it
            found[step] = float(store.get(f"{BEST_PREFIX}{step}"))
    return found


def keep_lowest(store: RunStore, keep_best: int, losses: Mapping[int, float]) -> None:
    """Keep the checkpoints of the `keep_best` steps with the lowest validation loss.

    losses: new ones, by step. A step whose checkpoint may still come is kept, and releases no
    other one.
    """
    known = best_losses(store) | dict(losses)
    places = map(parse_commit_key, list_commits(store))
    committed = {place[0] for place in places if place is not None}
    kept = {step for step in known if step > max(committed, default=0)}
    kept |= set(sorted(known.keys() & committed, key=lambda step: (known[step], step))[:keep_best])
    for step in losses.keys() & kept:
        store.delete(f"{BEST_PREFIX}{step}")  # of an earlier try of this step
        with suppress(AlreadyExistsError):
            store.create(f"{BEST_PREFIX}{step}", repr(losses[step]).encode())
    for step in known.keys() - kept:
        store.delete(f"{BEST_PREFIX}{step}")


def mark_kept_in_source(bucket: RunStore, steps: Collection[int]) -> None:
    """Let a bucket name the steps that the run folder keeps."""
    there = _marked_steps(bucket, KEPT_IN_SOURCE_PREFIX)
    for step in there - set(steps):
        bucket.delete(f"{KEPT_IN_SOURCE_PREFIX}{step}")
    for step in set(steps) - there:
        bucket.create(f"{KEPT_IN_SOURCE_PREFIX}{step}", b"")


def _marked_steps(store: RunStore, prefix: str) -> set[int]:
    names = (key.removeprefix(prefix) for key in store.list(prefix))
    return {int(name) for name in names if name.isdecimal()}


def keep_step(store: RunStore, step: int) -> None:
    """Keep the checkpoints of `step` until `release_step`."""
    with suppress(AlreadyExistsError):
        store.create(f"{KEPT_PREFIX}{step}", b"")


def release_step(store: RunStore, step: int) -> None:
    """Leave the checkpoints of `step` to the rules again."""
    with suppress(MissingKeyError):
        store.delete(f"{KEPT_PREFIX}{step}")


def apply_retention(
    store: RunStore,
    rules: RetentionRules,
    verified_steps: Collection[int],
    rejected_keys: Collection[str],
    in_use_keys: Collection[str] = (),
    coming_step: int | None = None,
) -> list[str]:
    """Remove what need not be kept; the keys of the commit objects that went.

    in_use_keys: keys that a reader uses just now; they are removed the next time. coming_step: as
    in `removable_commits`.
    """
    gone = [
        key
        for key in removable_commits(store, rules, verified_steps, rejected_keys, coming_step)
        if key not in in_use_keys
    ]
    for key in gone:
        store.delete(key)
        if position := parse_commit_key(key):
            discard_uncommitted(store, position[1], position[0])
    return gone


def removable_commits(
    store: RunStore,
    rules: RetentionRules,
    verified_steps: Collection[int],
    rejected_keys: Collection[str],
    coming_step: int | None = None,
    kept: Collection[int] = (),
) -> list[str]:
    """The commit objects that `apply_retention` would remove, newest first.

    kept: steps that stay, with those that the store names.
    coming_step: counts as a step that has a checkpoint, for a save that needs room. The newest good
    checkpoint then stays. A checkpoint that was rejected counts for nothing. It stays as evidence
    for as long as an older one that is kept.
    """
    keys = [(position, key) for key in list_commits(store) if (position := parse_commit_key(key))]
    good = {step for (step, _), key in keys if key not in rejected_keys}
    steps = good if coming_step is None else good | {coming_step}
    removable = set(removable_steps(steps, rules.keep_last, rules.keep_every, verified_steps))
    if coming_step is not None:
        removable.discard(max(good, default=0))
    removable -= kept_steps(store) | set(kept)
    oldest = min(good - removable, default=0)
    return [
        key
        for (step, _), key in keys
        if step in removable or (key in rejected_keys and step < oldest)
    ]


def superseded_commits(store: RunStore, generation: int, start_step: int | None) -> list[str]:
    """Commit objects of older generations later than the step that `generation` began from: who
    wrote them was fenced and did not know it yet."""
    found = ((key, parse_commit_key(key)) for key in list_commits(store))
    return [
        key
        for key, at in found
        if at and start_step is not None and at[1] < generation and at[0] > start_step
    ]


def discard_uncommitted(store: RunStore, generation: int, step: int) -> int:
    """Remove parts and blobs that no commit object names, manifests first; how many.

    Those of a committed checkpoint are never removed here.
    """
    if commit_key(generation, step) in list_commits(store):
        return 0
    keys = [*store.list(part_prefix(generation, step)), *store.list(data_prefix(generation, step))]
    for key in keys:
        store.delete(key)
    return len(keys)


def discard_rank_parts(store: RunStore, generation: int, step: int, ranks: Collection[int]) -> None:
    """Remove what these ranks have written of a step that cannot be committed, manifests first."""
    for rank in sorted(ranks):
        store.delete(part_key(generation, step, writer_name(rank)))
        store.delete(blob_key(generation, step, writer_name(rank)))


def sweep_older_generations(
    store: RunStore, generation: int, except_positions: Collection[tuple[int, int]] = ()
) -> int:
    """Remove what older generations began and never committed, objects and halves of objects, but
    for `except_positions` (step, generation); the number removed.

    They are fenced, so no process can complete it any more. But a mover that checked the fence just
    before the present generation was opened may make a commit object meanwhile. It is removed with
    what it names. A later one is taken back by its own maker (`writer.try_commit`).
    """
    count = store.sweep("commits/")
    for prefix in ("parts/", "data/"):
        count += store.sweep(prefix, keep=f"{prefix}{generation:010d}/")
    committed = {parse_commit_key(key) for key in list_commits(store)} | set(except_positions)
    gone = set()
    for key in (*store.list("parts/"), *store.list("data/")):
        found = parse_save_key(key)
        if found and found[1] < generation and found not in committed:
            store.delete(key)
            gone.add(found)
            count += 1
    for key in list_commits(store) if gone else ():
        if parse_commit_key(key) in gone:
            store.delete(key)
            count += 1
    return count
