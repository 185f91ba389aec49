"""Records of what each generation began from, in the run store."""

from __future__ import annotations

import json
from contextlib import suppress

from holdfast.core.json_parsing import parsed
from holdfast.errors import (
    CorruptError,
    FencedError,
)
from holdfast.wire.store.run_store import AlreadyExistsError, MissingKeyError, RunStore
from holdfast.wire.term import GENERATIONS, newest_generation, newest_number

STARTS = "starts/"


_NEVER = b'{"step": null}\n'
"""A note's place that was taken: see `settle`."""


def note_start(store: RunStore, generation: int, step: int, stored: bool = True) -> None:
    """Note the step from which a generation begins; written once. stored: from a checkpoint in the
    run store, not from memory. Raises FencedError if a newer one has been opened: a late note would
    give up what that one began from."""
    newest = newest_generation(store)
    if newest > generation:
        raise FencedError(f"generation {newest} has been opened: {generation} begins too late")
    settle(store, generation)
    try:
        note = {"step": step} if stored else {"step": step, "stored": False}
        store.create(_start_key(generation), json.dumps(note).encode() + b"\n")
    except AlreadyExistsError:  # said before, or by another mover; or its place was taken
        try:
            with suppress(CorruptError):
                _start_of(store, generation)
        except MissingKeyError:
            words = f"a newer generation has begun: {generation} comes too late"
            raise FencedError(words) from None


def settle(store: RunStore, present: int) -> None:
    """Take the places of missing notes of older generations, so that none can be written any more.
    A coordinator may sleep between its check of the fence and its note. Its late note would give up
    what a newer generation stands on. So call this before the newer generation chooses.
    """
    noted = set(_numbers(store, STARTS))
    for generation in _numbers(store, GENERATIONS):
        if generation < present and generation not in noted:
            with suppress(AlreadyExistsError):
                store.create(_start_key(generation), _NEVER)


def newest_start(store: RunStore) -> int:
    """The newest generation that noted from which step it began; 0 for none."""
    for generation in sorted(_numbers(store, STARTS), reverse=True):
        with suppress(MissingKeyError):
            with suppress(CorruptError):
                _start_of(store, generation)
            return generation
    return 0


def _numbers(store: RunStore, prefix: str) -> list[int]:
    return [n for key in store.list(prefix) if (n := newest_number([key], prefix))]


def starts(store: RunStore, after: int) -> dict[int, int]:
    """From which step each generation later than `after` began, where its note can be read."""
    begun: dict[int, int] = {}
    for key in store.list(STARTS):
        number = key.removeprefix(STARTS).removesuffix(".json")
        if number.isdecimal() and int(number) > after:
            with suppress(MissingKeyError, CorruptError):
                begun[int(number)] = _start_of(store, int(number))
    return begun


def given_up(store: RunStore, present: int, generation: int, step: int) -> bool:
    """Return True if a generation between the snapshot's and the present one began from an older
    step. Raises what the store raises: then it is unknown."""
    for later in range(generation + 1, present):
        with suppress(MissingKeyError):  # it was opened and has not begun
            if _start_of(store, later) < step:
                return True
    return False


def _start_of(store: RunStore, generation: int) -> int:
    """Raises MissingKeyError, also where its place was taken, and CorruptError."""
    key = _start_key(generation)
    data = store.get(key)
    if data == _NEVER:
        raise MissingKeyError(f"{key}: it had noted nothing when a newer one began")
    try:
        return int(parsed(data)["step"])
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise CorruptError(f"{key}: does not say from which step it began") from error


def _from_store(store: RunStore, generation: int) -> bool:
    """Return True if a generation that noted its start began from the run store. Assumed if the
    note cannot be read."""
    with suppress(MissingKeyError, ValueError):
        note = parsed(store.get(_start_key(generation)))
        return not (isinstance(note, dict) and note.get("stored") is False)
    return True


def _start_key(generation: int) -> str:
    return f"{STARTS}{generation:010d}.json"
