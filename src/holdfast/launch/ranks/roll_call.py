"""Whether the nodes that a launcher has started are those that it says it has started.

Each agent notes in the run store which ranks its node has, and waits until all ranks are there.
The notes lie under the number of the newest term. The next term begins only after the roll call, so
the notes of an earlier start lie elsewhere.

    roll-calls/<term>-<launcher>/<node>.json
"""

from __future__ import annotations

import json
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass

from holdfast.core.json_parsing import parse_json
from holdfast.errors import ConfigError
from holdfast.launch.ranks.launchers import LauncherPlace
from holdfast.wire.store.run_store import AlreadyExistsError, MissingKeyError, RunStore
from holdfast.wire.term import newest_term

RETRY_S = 0.2


@dataclass(frozen=True)
class _Note:
    """What one agent says. agent: random, so that two agents of one name are told apart."""

    node: str
    agent: str
    ranks: list[int]
    world: int

    @staticmethod
    def read(store: RunStore, key: str) -> _Note | None:
        with suppress(MissingKeyError, ValueError, TypeError):
            return _Note(**parse_json(store.get(key).decode()))
        return None


def call_roll(store: RunStore, place: LauncherPlace, timeout_s: float) -> None:
    """Return once the nodes have all processes that the launcher speaks of. Raises ConfigError if
    they do not fit together, or do not come in time."""
    folder = f"roll-calls/{newest_term(store)[0]:010d}-{place.launcher}/"
    agent = secrets.token_hex(8)
    own = _Note(place.node, agent, list(place.ranks), place.world)
    key = f"{folder}{place.node}.json"
    text = json.dumps(own.__dict__).encode()
    try:
        store.create(key, text)
    except AlreadyExistsError:  # of a start that did not come to its end
        store.delete(key)
        store.create(key, text)
    deadline = time.monotonic() + timeout_s
    try:
        while True:
            notes = [n for each in store.list(folder) if (n := _Note.read(store, each))]
            _refuse_unlike(place, own, notes)
            there = sum(len(note.ranks) for note in notes)
            if there == place.world:
                break
            if there > place.world or time.monotonic() > deadline:
                names = ", ".join(sorted(note.node for note in notes))
                raise _error(
                    place,
                    f"{place.variable} is {place.world}, and the nodes that came ({names}) have "
                    f"{there} processes",
                )
            time.sleep(RETRY_S)
        if place.nodes and len(notes) != place.nodes:
            names = ", ".join(sorted(note.node for note in notes))
            raise _error(place, f"{place.nodes} nodes were to come, and these came: {names}")
    except ConfigError:
        time.sleep(5 * RETRY_S)  # the other nodes shall read the note, and refuse as well
        with suppress(MissingKeyError):
            store.delete(key)
        raise


def _refuse_unlike(place: LauncherPlace, own: _Note, notes: list[_Note]) -> None:
    for note in notes:
        if note.world != place.world:
            what = f"{place.variable} is {place.world} here and {note.world} on node {note.node}"
            raise _error(place, what)
        if note.agent != own.agent and note.node == own.node:
            raise _error(place, f"two nodes are called {own.node} (POD_NAME gives another name)")
        if note.agent != own.agent and (same := set(note.ranks) & set(own.ranks)):
            raise _error(place, f"nodes {own.node} and {note.node} both have rank {min(same)}")


def _error(place: LauncherPlace, what: str) -> ConfigError:
    return ConfigError(
        f"the nodes of {place.launcher} do not fit together: {what}",
        where="environment",
        remedy=f"start all of them with one {place.launcher}",
    )
