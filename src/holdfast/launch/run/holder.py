"""The holder of a run folder's newest term: whether it lives.

    lives     It answers with the run's secret, or its term or the run's journal grows.
    dead      It closed its term. Or its own host refuses the connection, and no other node of the
              run answers. Or neither term nor journal has grown for `HOLDER_QUIET_S`.

A refused connection proves nothing on another host: 127.0.0.1 or a private address leads to
another machine there. So a holder that lives is found from every host that sees its folder. Its
clock does not matter: only what grows while we watch counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from holdfast.elastic.protocol.generation_record import record_of
from holdfast.errors import CorruptError, RunFolderError
from holdfast.events import Record, StepDone
from holdfast.launch.run.runs import read_secrets
from holdfast.wire.journal import parse_segment, segment_key
from holdfast.wire.secret import Secret
from holdfast.wire.store.run_location import store_of_run
from holdfast.wire.store.run_store import MissingKeyError, RunStore
from holdfast.wire.term import (
    HolderReply,
    Host,
    count_life_signs,
    host_of,
    is_host_of,
    newest_generation,
    newest_term,
    probe_holder,
    this_host,
)

HOLDER_QUIET_S = 30.0
"""Seconds without growth of term and journal after which a holder is dead. A holder that lives
appends to its term every 2 s (`TERM_CHECK_INTERVAL_S`)."""
WATCH_INTERVAL_S = 1.0
ANSWER_TIMEOUT_S = 10.0  # Seconds to wait for a trainer on this host: a slow one is not lost
REMOTE_ANSWER_TIMEOUT_S = 3.0
"""Seconds to wait for a trainer on another host: its address may mean nothing here."""
MAX_PROBED_NODES = 64
"""Nodes of a run that are asked whether they are still there: if it is alive, so is one of them."""
JOURNAL_END_BYTES = 1 << 16
"""Bytes at the end of a journal segment that are searched for the last step."""
_LOOPBACK = ("127.", "localhost:", "[::1]:")
_NO_SECRET = Secret(bytes(32))  # of a request that is only to be refused, or not


@dataclass(frozen=True)
class _Progress:
    """What a holder that lives makes grow."""

    term: int
    life_signs: int
    generation: int
    journal_bytes: int


class HolderWatch:
    """The watch over one run folder's holder. What it has seen stays known: a holder that was found
    dead need not be watched again, unless something has grown since."""

    def __init__(
        self,
        folder: Path,
        say: Callable[[str], None] = lambda line: None,
        quiet_s: float | None = None,
        host: Host | None = None,
    ) -> None:
        """say: prints one line, before a wait. quiet_s: instead of `HOLDER_QUIET_S`. host: where
        this watch runs, if it is not this host."""
        self.holder: dict[str, Any] | None = None
        """The holder of the newest term at the last look; None if the term is closed."""
        self.folder, self._say = folder, say
        self._quiet_s = HOLDER_QUIET_S if quiet_s is None else quiet_s
        self._host = host or this_host()
        self._seen: _Progress | None = None
        self._seen_at = 0.0
        self._working_node = ""  # a node other than the holder that has answered

    def wait_for_verdict(self) -> bool:
        """Return True if the holder lives; watch it if no answer tells."""
        told = False
        while (verdict := self.look()) is None:
            if not told:
                told = True
                self._say(
                    f"{self.describe_holder()} does not answer: waiting up to {self._quiet_s:g} s "
                    "for a sign of life"
                )
            time.sleep(min(WATCH_INTERVAL_S, self._quiet_s / 10))
        return verdict

    def look(self) -> bool | None:
        """Look once: True if the holder lives, False if it is dead, None if that is not known yet.

        Raises RunFolderError if the folder, or the run's secret, cannot be read."""
        store = store_of_run(self.folder)
        number, self.holder = newest_term(store)
        if self.holder is None:
            return False
        generation = newest_generation(store)
        total = 0
        for key in _segments(store, generation):
            try:
                total += store.size(key)
            except MissingKeyError:
                continue  # the folder was moved just now
        progress = _Progress(number, count_life_signs(store, number), generation, total)
        before, now = self._seen, time.monotonic()
        if progress != before:
            self._seen, self._seen_at = progress, now
            if before is not None:
                return True
        elif now - self._seen_at >= self._quiet_s:
            return False
        return self._ask(store)

    def describe_holder(self) -> str:
        """Return who has the run, since when, and its last step."""
        holder = self.holder or {}
        since = datetime.fromtimestamp(float(holder.get("since", 0)))
        step = _last_step(store_of_run(self.folder))
        who = f"process {holder.get('pid')} on {holder.get('node')}"
        machine = host_of(holder).name
        if machine != holder.get("node"):
            who += f" (host {machine})"
        who += f", since {since:%Y-%m-%d %H:%M:%S}"
        who += f", last step {step}" if step else ", before its first step"
        return f"{who}; node {self._working_node} is at work" if self._working_node else who

    def _ask(self, store: RunStore) -> bool | None:
        """Ask the holder, and the nodes of the newest generation: they may be about to open the
        next term."""
        assert self.holder is not None
        address, secrets = str(self.holder.get("address", "")), read_secrets(self.folder)
        is_here = is_host_of(self._host, self.holder)
        timeout = ANSWER_TIMEOUT_S if is_here else REMOTE_ANSWER_TIMEOUT_S
        reply = ask_holder(address, secrets, timeout)
        if reply is HolderReply.LIVES:
            return True
        is_single = bool(self.holder.get("alone"))
        replies = {} if is_single else _ask_nodes(store, secrets)
        lives = (name for name, said in replies.items() if said is HolderReply.LIVES)
        self._working_node = next(lives, "")
        if self._working_node:
            return True
        # All nodes of a leader at a loopback address are on its host.
        all_here = is_here and (is_single or address.startswith(_LOOPBACK))
        return False if all_here and {reply, *replies.values()} == {HolderReply.REFUSED} else None


def is_holder_gone(watch: HolderWatch) -> bool:
    """Return True if a look shows that the holder is dead; False if that is not known."""
    try:
        return watch.look() is False
    except RunFolderError:  # of the secret, which a mere reader of a run does not need
        return False


def ask_holder(address: str, secrets: Sequence[Secret], timeout_s: float) -> HolderReply:
    """Ask with each of the secrets, until one is accepted or nothing listens there."""
    reply = HolderReply.SILENT
    for secret in secrets or (_NO_SECRET,):
        reply = probe_holder(address, secret, timeout_s)
        if reply is not HolderReply.UNSIGNED:
            return reply
    return reply


def _ask_nodes(store: RunStore, secrets: Sequence[Secret]) -> dict[str, HolderReply]:
    """Ask the nodes of the newest generation, all at once."""
    newest = newest_generation(store)
    try:
        addresses = record_of(store, newest).addresses if newest else {}
    except (CorruptError, MissingKeyError):
        return {}
    names = list(addresses)[:MAX_PROBED_NODES]
    if not names:
        return {}

    def ask(name: str) -> HolderReply:
        return ask_holder(addresses[name], secrets, REMOTE_ANSWER_TIMEOUT_S)

    with ThreadPoolExecutor(len(names), "ask") as threads:
        return dict(zip(names, threads.map(ask, names), strict=True))


def _last_step(store: RunStore) -> int:
    """Return the last step in the journal, by the newest generation that has any; 0 for none."""
    for generation in range(newest_generation(store), 0, -1):
        steps = [
            record.event.step
            for key in _segments(store, generation)
            for record in _read_end(store, key)
            if isinstance(record.event, StepDone)
        ]
        if steps:
            return max(steps)
    return 0


def _read_end(store: RunStore, key: str) -> list[Record]:
    """Return the last records of a segment, none of one that cannot be read."""
    try:
        size = store.size(key)
        data = bytearray(min(size, JOURNAL_END_BYTES))
        store.read_into(key, size - len(data), memoryview(data))
        whole = bytes(data) if len(data) == size else bytes(data).partition(b"\n")[2]
        return parse_segment(key, whole).records
    except (CorruptError, MissingKeyError):
        return []


def _segments(store: RunStore, generation: int) -> list[str]:
    return store.list(segment_key(generation, "").removesuffix(".jsonl"))
