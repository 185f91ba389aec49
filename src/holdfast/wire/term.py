"""Exclusive use of a run folder, and the numbering of generations.

A term is an object `terms/<t>.json` that can be created once, by one trainer. It names that
trainer's address; a later trainer sends an authenticated request there. An answer means that the
folder is in use. No answer by the deadline means that the trainer is lost (a lock file would not
know): open the next term. If the older trainer was merely cut off, it finds the newer term and
stops.
"""

from __future__ import annotations

import json
import os
import platform
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from holdfast.core.json_parsing import parse_json
from holdfast.errors import CorruptError, FencedError, HoldfastError, RunFolderError
from holdfast.wire.http.auth import AuthError
from holdfast.wire.http.client import NO_GENERATION, Client, RequestError
from holdfast.wire.secret import Secret
from holdfast.wire.store.run_store import AlreadyExistsError, MissingKeyError, RunStore

TERMS_PREFIX = "terms/"
GENERATIONS_PREFIX = "generations/"
TERM_PATH = "/term"
"""Path of the request that checks for a trainer."""


@dataclass(frozen=True)
class Term:
    """A numbered reign over a run folder."""

    store: RunStore
    number: int
    address: str
    content: bytes = field(repr=False)  # the content of our object, unlike any other's

    def check(self) -> None:
        """Raises FencedError when a newer term has been opened, or ours is missing. In the second
        case the run folder was moved or removed, and another one may lie at its path."""
        newest, _ = newest_term(self.store)
        if newest > self.number:
            raise FencedError(
                f"another trainer has taken over the run folder (term {newest}, ours was "
                f"{self.number})"
            )
        try:
            found = self.store.get(_term_key(self.number))
        except MissingKeyError:
            found = None
        if found != self.content:
            raise FencedError(
                f"the run folder has been moved, removed or replaced (our term {self.number} is "
                f"not in it); put it back, or start another run"
            )

    def close(self) -> None:
        """Say that this reign is over, so that the next trainer need not ask."""
        try:
            self.store.create(_closed_key(self.number), b"{}\n")
        except AlreadyExistsError:
            return


def open_term(
    store: RunStore,
    address: str,
    secret: Secret,
    is_trainer_there: Callable[[str], bool] | None = None,
) -> Term:
    """Open the next term, from `address`, where the caller listens already.

    `answers(address)` asks whether a trainer of this run is there (default: `asks(secret)`).
    Raises RunFolderError when one is.
    """
    ask = is_trainer_there or holder_probe(secret)
    while True:
        newest, holder = newest_term(store)
        if holder is not None and ask(str(holder.get("address", ""))):
            raise RunFolderError(
                _in_use_message(holder), remedy="stop it, or use another run folder"
            )
        term = create_term(store, newest + 1, address, platform.node(), is_single_node=True)
        if term is not None:
            return term  # else another trainer was faster: ask that one


def create_term(
    store: RunStore, number: int, address: str, node: str, is_single_node: bool = False
) -> Term | None:
    """Open term `number` without a request to the last trainer; None if another trainer was faster.
    is_single_node: of a run that takes in no other node."""
    value = {
        "term": number,
        "node": node,
        "machine": platform.node(),
        "alone": is_single_node,
        "pid": os.getpid(),
        "address": address,
        "since": time.time(),
    }
    held = json.dumps(value).encode() + b"\n"
    try:
        store.create(_term_key(number), held)
    except AlreadyExistsError:
        return None
    return Term(store, number, address, held)


def holder_probe(secret: Secret, timeout_s: float = 10.0) -> Callable[[str], bool]:
    """Return the check itself: True only for an answer signed with this run's secret, even a
    refusal.

    A refused connection is told apart from silence at once. So only a lost node or a suspended
    trainer takes the full deadline (seconds). It is long on purpose: a trainer on an overloaded
    machine must not lose its run folder for being slow.
    """

    return lambda address: probe_holder(address, secret, timeout_s) is True


def probe_holder(address: str, secret: Secret, timeout_s: float) -> bool | None:
    """As `asks`; None where an answer is not signed with this secret."""
    try:
        client = Client(address, secret, NO_GENERATION, connect_retry_s=0.0)
    except ValueError:
        return False
    try:
        client.post(TERM_PATH, {}, timeout_s)
    except (RequestError, FencedError):
        return True  # signed by a holder of the secret
    except AuthError:
        return None
    except HoldfastError:
        return False
    finally:
        client.close()
    return True


def newest_term(store: RunStore) -> tuple[int, dict[str, Any] | None]:
    """(number, who holds it): number 0 before the first, None when it was closed."""
    keys = store.list(TERMS_PREFIX)
    number = newest_number(keys, TERMS_PREFIX)
    if not number or _closed_key(number) in keys:
        return number, None
    try:
        value = parse_json(store.get(_term_key(number)))
    except (ValueError, MissingKeyError):
        return number, None
    return number, value if isinstance(value, dict) else None


def newest_generation(store: RunStore) -> int:
    """The highest generation ever opened; 0 before the first."""
    return newest_number(store.list(GENERATIONS_PREFIX), GENERATIONS_PREFIX)


def newest_number(keys: list[str], prefix: str) -> int:
    """The highest number among objects `<prefix><ten digits>.json`, 0 for none. Any other file
    there (an editor's copy, a user's notes) is not ours and does not count."""
    whole = re.compile(re.escape(prefix) + r"([0-9]{10,})\.json")
    return max((int(found[1]) for key in keys if (found := whole.fullmatch(key))), default=0)


def create_generation(store: RunStore, generation: int, value: dict[str, Any]) -> None:
    """Create the object of `generation`, which fences all older ones. Two that were parted and
    count on alike are told apart by a random mark in it.

    Raises FencedError when it, or a newer one, has been opened already.
    """
    newest = newest_generation(store)
    if newest >= generation:
        raise FencedError(f"generation {newest} has been opened: {generation} comes too late")
    try:
        marked = {**value, "mark": secrets.token_hex(8)}
        store.create(generation_key(generation), json.dumps(marked).encode() + b"\n")
    except AlreadyExistsError:
        raise FencedError(f"generation {generation} has been opened by somebody else") from None


def read_generation(store: RunStore, generation: int) -> dict[str, Any]:
    """Return the content of a generation's object. Raises MissingKeyError, CorruptError."""
    key = generation_key(generation)
    try:
        value = parse_json(store.get(key))
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise CorruptError(f"{key}: does not say who takes part")
    return value


def generation_key(generation: int) -> str:
    return f"{GENERATIONS_PREFIX}{generation:010d}.json"


def _term_key(number: int) -> str:
    return f"{TERMS_PREFIX}{number:010d}.json"


def _closed_key(number: int) -> str:
    return f"{TERMS_PREFIX}{number:010d}-closed.json"


def _in_use_message(holder: dict[str, Any]) -> str:
    since = datetime.fromtimestamp(float(holder.get("since", 0))).strftime("%Y-%m-%d %H:%M:%S")
    return (
        f"another trainer uses the run folder: process {holder.get('pid')} on "
        f"{holder.get('node')}, since {since}"
    )
