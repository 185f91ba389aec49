"""Records of what each generation began from, in the run store."""

from __future__ import annotations

import json
from contextlib import suppress

from holdfast.core.json_parsing import parse_json
from holdfast.errors import CorruptError, FencedError
from holdfast.wire.store.run_store import AlreadyExistsError, MissingKeyError, RunStore
from holdfast.wire.term import GENERATIONS_PREFIX, newest_generation, newest_number

STARTS_PREFIX = "starts/"

_CLOSED = b'{"step": null}\n'  # A note's place that was taken: see `settle`


def record_start(store: RunStore, generation: int, step: int, is_from_store: bool = True) -> None:
    """Note the step from which a generation begins; written once. stored: from a checkpoint in the
    run store, not from memory. Raises FencedError if a newer one has been opened: a late note would
    give up what that one began from."""
    newest = newest_generation(store)
    if newest > generation:
        raise FencedError(f"generation {newest} has been opened: {generation} begins too late")
    close_unstarted(store, generation)
    try:
        note = {"step": step} if is_from_store else {"step": step, "stored": False}
        store.create(_start_key(generation), json.dumps(note).encode() + b"\n")
    except AlreadyExistsError:  # said before, or by another mover; or its place was taken
        try:
            with suppress(CorruptError):
                _read_start(store, generation)
        except MissingKeyError:
            words = f"a newer generation has begun: {generation} comes too late"
            raise FencedError(words) from None


def close_unstarted(store: RunStore, current_generation: int) -> None:
    """Take the places of missing notes of older generations, so that none can be written any more.
    A coordinator may sleep between its check of the fence and its note. Its late note would give up
    what a newer generation stands on. So call this before the newer generation chooses.
    """
    noted = set(_generation_numbers(store, STARTS_PREFIX))
    for generation in _generation_numbers(store, GENERATIONS_PREFIX):
        if generation < current_generation and generation not in noted:
            with suppress(AlreadyExistsError):
                store.create(_start_key(generation), _CLOSED)


def newest_started_generation(store: RunStore) -> int:
    """The newest generation that noted from which step it began; 0 for none."""
    for generation in sorted(_generation_numbers(store, STARTS_PREFIX), reverse=True):
        with suppress(MissingKeyError):
            with suppress(CorruptError):
                _read_start(store, generation)
            return generation
    return 0


def _generation_numbers(store: RunStore, prefix: str) -> list[int]:
    return [n for key in store.list(prefix) if (n := newest_number([key], prefix))]


def read_starts(store: RunStore, after: int) -> dict[int, int]:
    """From which step each generation later than `after` began, where its note can be read."""
    begun: dict[int, int] = {}
    for key in store.list(STARTS_PREFIX):
        number = key.removeprefix(STARTS_PREFIX).removesuffix(".json")
        if number.isdecimal() and int(number) > after:
            with suppress(MissingKeyError, CorruptError):
                begun[int(number)] = _read_start(store, int(number))
    return begun


def is_superseded(store: RunStore, current_generation: int, generation: int, step: int) -> bool:
    """Return True if a generation between the snapshot's and the present one began from an older
    step. Raises what the store raises: then it is unknown."""
    for later in range(generation + 1, current_generation):
        with suppress(MissingKeyError):  # it was opened and has not begun
            if _read_start(store, later) < step:
                return True
    return False


def _read_start(store: RunStore, generation: int) -> int:
    """Raises MissingKeyError, also where its place was taken, and CorruptError."""
    key = _start_key(generation)
    data = store.get(key)
    if data == _CLOSED:
        raise MissingKeyError(f"{key}: it had noted nothing when a newer one began")
    try:
        return int(parse_json(data)["step"])
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise CorruptError(f"{key}: does not say from which step it began") from error


def _began_from_store(store: RunStore, generation: int) -> bool:
    """Return True if a generation that noted its start began from the run store. Assumed if the
    note cannot be read."""
    with suppress(MissingKeyError, ValueError):
        note = parse_json(store.get(_start_key(generation)))
        return not (isinstance(note, dict) and note.get("stored") is False)
    return True


def _start_key(generation: int) -> str:
    return f"{STARTS_PREFIX}{generation:010d}.json"
