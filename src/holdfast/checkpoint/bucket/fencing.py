"""Generations are fenced in a bucket as they are in a run folder.

A machine that was cut off has its own run folder, which does not know the generation that continues
elsewhere. So the first upload of a generation makes its object in the bucket too. Every writer
checks before it sends or removes something there: the bucket's newest generation must be one of its
own. A number alone would not prove that, for two separated folders count alike: the object must be
the same. A fenced writer writes and removes nothing there until a start takes over the bucket's
generations (`take_over`).

The notes of starts go along, so that a branch which was given up is known for one there as well.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Collection
from contextlib import suppress

from holdfast.checkpoint.restore.start_records import STARTS, starts
from holdfast.core.format.manifest import parse_commit_key
from holdfast.errors import FencedError, HoldfastError
from holdfast.wire.store.run_store import AlreadyExistsError, MissingKeyError, RunStore
from holdfast.wire.term import generation_key, newest_generation, newest_number

_NOTHING = b"{}\n"


def enter(source: RunStore, target: RunStore, at_least: int) -> int:
    """Fence what is older than the source's newest generation in the target; return that
    generation, or `at_least`. Raises FencedError if the target's newest is none of the source's."""
    own = max(newest_generation(source), at_least)
    newest = newest_generation(target)
    if newest > own or (newest and _said(target, newest) != _said(source, newest)):
        raise _fenced(newest)
    if newest < own:
        mine = _said(source, own)
        try:
            target.create(generation_key(own), mine)
        except AlreadyExistsError:
            if _said(target, own) != mine:
                raise _fenced(own) from None
    return own


def check(target: RunStore, own: int) -> None:
    """Raises FencedError when the target knows a generation newer than `own`."""
    newest = newest_generation(target)
    if newest > own:
        raise _fenced(newest)


def take_over(folder: RunStore, bucket: RunStore, say: Callable[[str], None]) -> None:
    """Make a starting trainer's next generation newer than all that the bucket knows, there and in
    the folder. The trainer has the folder for itself."""
    try:
        newest, own = newest_generation(bucket), newest_generation(folder)
        if not newest:
            return
        if own < newest:
            folder.create(generation_key(newest), _said(bucket, newest))
        elif _said(folder, newest) != _said(bucket, newest):
            value = {"instead_of": newest, "mark": secrets.token_hex(8)}
            data = json.dumps(value).encode() + b"\n"
            bucket.create(generation_key(own + 1), data)
            folder.create(generation_key(own + 1), data)
    except HoldfastError as error:
        say(f"the run goes on without its bucket for now: {error}")


def carry_notes(source: RunStore, target: RunStore) -> None:
    """The notes of starts that the target does not have."""
    for key in sorted(set(source.list(STARTS)) - set(target.list(STARTS))):
        if not newest_number([key], STARTS):
            continue  # a strange file, and no note
        with suppress(AlreadyExistsError, MissingKeyError):
            target.create(key, source.get(key))


def abandoned(store: RunStore, keys: Collection[str]) -> set[str]:
    """Those of the checkpoints that were given up: a later generation, by the notes of `store`,
    began from an older step. A note that cannot be read says nothing."""
    at = {key: found for key in keys if (found := parse_commit_key(key))}
    if not at:
        return set()
    notes = starts(store, min(generation for _, generation in at.values()))
    return {
        key
        for key, (step, generation) in at.items()
        if any(later > generation and begun < step for later, begun in notes.items())
    }


def _said(store: RunStore, generation: int) -> bytes:
    try:
        return store.get(generation_key(generation))
    except MissingKeyError:
        return _NOTHING


def _fenced(newest: int) -> FencedError:
    return FencedError(
        f"the bucket belongs to generation {newest}, which began elsewhere: nothing is sent there "
        "any more"
    )
