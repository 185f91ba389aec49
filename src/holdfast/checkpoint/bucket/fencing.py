"""Generations are fenced in a bucket as they are in a run folder.

A machine that was cut off has its own run folder, which does not know the generation that continues
elsewhere. So the first upload of a generation makes its object in the bucket too. Every writer
checks before it sends or removes something there: the bucket's newest generation must be one of its
own. A number alone would not prove that, for two separated folders count alike: the object must be
the same. A fenced writer writes and removes nothing there until a start takes over the bucket's
generations (`adopt_bucket_generation`).

The notes of starts go along, so that a branch which was given up is known for one there as well.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Collection
from contextlib import suppress

from holdfast.checkpoint.restore.start_records import STARTS_PREFIX, read_starts
from holdfast.core.format.manifest import parse_commit_key
from holdfast.errors import FencedError, HoldfastError
from holdfast.wire.store.run_store import AlreadyExistsError, MissingKeyError, RunStore
from holdfast.wire.term import generation_key, newest_generation, newest_number

_EMPTY_OBJECT = b"{}\n"


def enter_target(source: RunStore, target: RunStore, min_generation: int) -> int:
    """Fence what is older than the source's newest generation in the target; return that
    generation, or `min_generation`. Raises FencedError if the target's newest is none of the
    source's."""
    own = max(newest_generation(source), min_generation)
    newest = newest_generation(target)
    if newest > own or (
        newest
        and _read_generation_object(target, newest) != _read_generation_object(source, newest)
    ):
        raise _fenced_error(newest)
    if newest < own:
        mine = _read_generation_object(source, own)
        try:
            target.create(generation_key(own), mine)
        except AlreadyExistsError:
            if _read_generation_object(target, own) != mine:
                raise _fenced_error(own) from None
    return own


def check_target(target: RunStore, own_generation: int) -> None:
    """Raises FencedError when the target knows a generation newer than `own_generation`."""
    newest = newest_generation(target)
    if newest > own_generation:
        raise _fenced_error(newest)


def adopt_bucket_generation(folder: RunStore, bucket: RunStore, say: Callable[[str], None]) -> None:
    """Make a starting trainer's next generation newer than all that the bucket knows, there and in
    the folder. The trainer has the folder for itself."""
    try:
        newest, own = newest_generation(bucket), newest_generation(folder)
        if not newest:
            return
        if own < newest:
            folder.create(generation_key(newest), _read_generation_object(bucket, newest))
        elif _read_generation_object(folder, newest) != _read_generation_object(bucket, newest):
            value = {"instead_of": newest, "mark": secrets.token_hex(8)}
            data = json.dumps(value).encode() + b"\n"
            bucket.create(generation_key(own + 1), data)
            folder.create(generation_key(own + 1), data)
    except HoldfastError as error:
        say(f"the run continues without its bucket for now: {error}")


def copy_start_records(source: RunStore, target: RunStore) -> None:
    """The notes of starts that the target does not have."""
    for key in sorted(set(source.list(STARTS_PREFIX)) - set(target.list(STARTS_PREFIX))):
        if not newest_number([key], STARTS_PREFIX):
            continue  # a strange file, and no note
        with suppress(AlreadyExistsError, MissingKeyError):
            target.create(key, source.get(key))


def superseded_keys(store: RunStore, keys: Collection[str]) -> set[str]:
    """Those of the checkpoints that were given up: a later generation, by the notes of `store`,
    began from an older step. A note that cannot be read says nothing."""
    at = {key: found for key in keys if (found := parse_commit_key(key))}
    if not at:
        return set()
    notes = read_starts(store, min(generation for _, generation in at.values()))
    return {
        key
        for key, (step, generation) in at.items()
        if any(later > generation and begun < step for later, begun in notes.items())
    }


def _read_generation_object(store: RunStore, generation: int) -> bytes:
    try:
        return store.get(generation_key(generation))
    except MissingKeyError:
        return _EMPTY_OBJECT


def _fenced_error(newest: int) -> FencedError:
    return FencedError(
        f"the bucket belongs to generation {newest}, which began elsewhere: nothing is sent there "
        "any more"
    )
