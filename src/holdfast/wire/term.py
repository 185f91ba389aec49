"""Exclusive use of a run folder, and the numbering of generations.

A term is an object `terms/<t>.json` that can be created once, by one trainer. It names that
trainer's host and address. While the trainer lives, it appends to `terms/<t>-alive`. A later
trainer finds out whether it lives (`launch/run/holder.py`), and opens the next term only if not. (A
lock file would not know.) If the older trainer was merely cut off, it finds the newer term and
stops.
"""

from __future__ import annotations

import json
import os
import platform
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from holdfast.core.json_parsing import parse_json
from holdfast.errors import CorruptError, FencedError, HoldfastError, RunFolderError
from holdfast.wire.http.auth import AuthError
from holdfast.wire.http.client import NO_GENERATION, Client, RequestError
from holdfast.wire.http.tls import with_tls
from holdfast.wire.secret import Secret
from holdfast.wire.store.run_store import (
    AlreadyExistsError,
    MissingKeyError,
    ReplacingStore,
    RunStore,
    append_interval,
)

TERMS_PREFIX = "terms/"
GENERATIONS_PREFIX = "generations/"
TERM_PATH = "/term"
"""Path of the request that checks for a trainer."""
_BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Host:
    """A host by name and boot id. The boot id is new after each boot, "" if the system has none."""

    name: str
    boot: str


def this_host() -> Host:
    try:
        boot = _BOOT_ID_FILE.read_text().strip()
    except OSError:
        boot = ""
    return Host(platform.node(), boot)


def host_of(holder: dict[str, Any]) -> Host:
    """Return the host of a term's holder. An older version does not write its boot: "" then."""
    return Host(str(holder.get("machine", holder.get("node"))), str(holder.get("boot", "")))


def is_host_of(host: Host, holder: dict[str, Any]) -> bool:
    """Return True if a term's holder was started on this host, in this boot. For a holder of an
    older version the name has to do, as it did for that version."""
    its = host_of(holder)
    return its.name == host.name and its.boot in ("", host.boot)


def secret_of(holder: Mapping[str, Any] | None, secret: Secret) -> Secret:
    """Return the secret as the processes of a term's holder use it: with TLS, or without."""
    is_encrypted = holder is not None and bool(holder.get("tls"))
    return with_tls(secret) if is_encrypted else Secret(secret.key)


@dataclass(frozen=True)
class Term:
    """A numbered reign over a run folder."""

    store: RunStore
    number: int
    address: str
    content: bytes = field(repr=False)  # the content of our object, unlike any other's

    def check(self) -> None:
        """Raises RunFolderError if our term is not in the run folder. Then the folder was moved,
        removed or unmounted, and another one may lie at its path. Raises FencedError when our term
        is there, and a newer one too."""
        newest, _ = newest_term(self.store)
        try:
            found = self.store.get(_term_key(self.number))
        except MissingKeyError:
            found = None
        if found != self.content:
            raise RunFolderError(
                "the run folder has been moved, removed, replaced or unmounted (our term "
                f"{self.number} is not in it)",
                remedy="put it back, or start another run",
            )
        if newest > self.number:
            raise FencedError(
                f"another trainer has taken over the run folder (term {newest}, ours was "
                f"{self.number})"
            )

    def show_life(self) -> None:
        """Change the term's sign of life, for a start that cannot reach this trainer. In a folder
        it grows. In a bucket it is one object with the time, as a growing one would be many."""
        if isinstance(self.store, ReplacingStore) and append_interval(self.store) > 0:
            self.store.replace(_life_key(self.number), b"%d" % time.time_ns())
        else:
            self.store.append(_life_key(self.number), b".")

    def close(self) -> None:
        """Say that this reign is over, so that the next trainer need not ask."""
        try:
            self.store.create(_closed_key(self.number), b"{}\n")
        except AlreadyExistsError:
            return


def open_term(
    store: RunStore, address: str, refuse_live_holder: Callable[[], None], uses_tls: bool = False
) -> Term:
    """Open the next term, from `address`, where the caller listens already.

    refuse_live_holder: raises RunFolderError while the holder of the newest term lives.
    """
    while True:
        newest, _ = newest_term(store)
        refuse_live_holder()
        term = create_term(
            store, newest + 1, address, platform.node(), is_single_node=True, uses_tls=uses_tls
        )
        if term is not None:
            return term  # else another trainer was faster: the next look finds it


def create_term(
    store: RunStore,
    number: int,
    address: str,
    node: str,
    is_single_node: bool = False,
    host: Host | None = None,
    uses_tls: bool = False,
) -> Term | None:
    """Open term `number` without a request to the last trainer; None if another trainer was faster.
    is_single_node: of a run that takes in no other node. host: this host, if not given. uses_tls:
    the agents of the run speak TLS."""
    host = host or this_host()
    value = {
        "term": number,
        "node": node,
        "machine": host.name,
        "boot": host.boot,
        "alone": is_single_node,
        "pid": os.getpid(),
        "address": address,
        "since": time.time(),
    }
    if uses_tls:
        value["tls"] = True
    held = json.dumps(value).encode() + b"\n"
    try:
        store.create(_term_key(number), held)
    except AlreadyExistsError:
        return None
    return Term(store, number, address, held)


class HolderReply(Enum):
    """What is at the address of a term's holder."""

    LIVES = "lives"  # an answer that is signed with this run's secret, even a refusal
    UNSIGNED = "unsigned"  # an answer of a process that does not accept, or know, this secret
    REFUSED = "refused"  # no process listens there
    SILENT = "silent"  # no answer, or no such address


def holder_probe(secret: Secret, timeout_s: float = 10.0) -> Callable[[str], bool]:
    """Return a check for a trainer at an address. The deadline (seconds) is long on purpose: a
    trainer on an overloaded machine is slow."""
    return lambda address: probe_holder(address, secret, timeout_s) is HolderReply.LIVES


def probe_holder(address: str, secret: Secret, timeout_s: float) -> HolderReply:
    """Send a signed request to an address, and return what is there."""
    try:
        client = Client(address, secret, NO_GENERATION, connect_retry_s=0.0)
    except ValueError:
        return HolderReply.SILENT
    try:
        client.post(TERM_PATH, {}, timeout_s)
    except (RequestError, FencedError):
        return HolderReply.LIVES  # signed by a holder of the secret
    except AuthError:
        return HolderReply.UNSIGNED
    except HoldfastError as error:
        refused = isinstance(error.__cause__, ConnectionRefusedError)
        return HolderReply.REFUSED if refused else HolderReply.SILENT
    finally:
        client.close()
    return HolderReply.LIVES


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


def read_newest_term_object(store: RunStore) -> tuple[str, bytes] | None:
    """Return key and content of the newest term, whether it was closed or not; None before it."""
    number = newest_number(store.list(TERMS_PREFIX), TERMS_PREFIX)
    return (_term_key(number), store.get(_term_key(number))) if number else None


def count_life_signs(store: RunStore, number: int) -> int:
    """Return a number that differs after each sign of life of a term's holder. Reads all of the
    object: a network file system may know its old size for a minute."""
    try:
        content = store.get(_life_key(number))
    except MissingKeyError:
        return 0
    return int(content) if content.isdigit() else len(content)


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


def _life_key(number: int) -> str:
    return f"{TERMS_PREFIX}{number:010d}-alive"
