from __future__ import annotations

import json
import os
import socket
import threading
from typing import Any

import pytest

from holdfast.errors import FencedError, RunFolderError
from holdfast.wire.secret import Secret
from holdfast.wire.term import (
    TERM_PATH,
    HolderReply,
    count_life_signs,
    create_generation,
    generation_key,
    holder_probe,
    host_of,
    newest_generation,
    newest_term,
    open_term,
    probe_holder,
    this_host,
)
from tests.runtime.wire.http.test_client_and_server import serving
from tests.support.memory_store import MemoryStore

SECRET = Secret(b"s" * 32)


def _no_holder() -> None:
    """The holder of the newest term does not live."""


def test_a_closed_term_has_no_holder() -> None:
    store = MemoryStore()
    first = open_term(store, "127.0.0.1:1", _no_holder)
    assert first.number == 1
    holder = json.loads(store.get("terms/0000000001.json"))
    assert (holder["pid"], holder["address"]) == (os.getpid(), "127.0.0.1:1")
    assert host_of(holder) == this_host()
    first.check()
    first.close()
    first.close()
    assert newest_term(store) == (1, None)
    assert open_term(store, "127.0.0.1:2", _no_holder).number == 2


def test_no_term_is_opened_beside_a_holder_that_lives() -> None:
    store = MemoryStore()
    open_term(store, "127.0.0.1:1", _no_holder)

    def refuse() -> None:
        raise RunFolderError("in use")

    with pytest.raises(RunFolderError, match="in use"):
        open_term(store, "127.0.0.1:2", refuse)
    assert newest_term(store)[0] == 1


def test_a_silent_holder_is_succeeded_and_finds_out() -> None:
    store = MemoryStore()
    old = open_term(store, "127.0.0.1:1", _no_holder)
    new = open_term(store, "127.0.0.1:2", _no_holder)
    assert new.number == 2
    new.check()
    with pytest.raises(FencedError, match="taken over"):
        old.check()


def test_a_term_that_is_gone_or_another_ones_is_not_ours() -> None:
    """The run folder was moved aside, and perhaps another run begun at its path. That ends no term,
    however new the terms there are."""
    store = MemoryStore()
    term = open_term(store, "127.0.0.1:1", _no_holder)
    store.delete("terms/0000000001.json")
    with pytest.raises(RunFolderError, match="moved, removed, replaced or unm"):
        term.check()
    for number in (1, 2):
        open_term(store, f"127.0.0.1:{number}", _no_holder)
        with pytest.raises(RunFolderError, match="moved, removed, replaced or unm"):
            term.check()


def test_signs_of_life_are_counted_for_each_term() -> None:
    store = MemoryStore()
    first = open_term(store, "127.0.0.1:1", _no_holder)
    assert count_life_signs(store, 1) == 0
    first.show_life()
    first.show_life()
    open_term(store, "127.0.0.1:2", _no_holder)
    assert (count_life_signs(store, 1), count_life_signs(store, 2)) == (2, 0)
    assert newest_term(store)[0] == 2


def test_of_many_at_once_one_wins() -> None:
    store = MemoryStore()
    start, won, refused = threading.Barrier(8), [], []

    def refuse() -> None:
        if newest_term(store)[0]:
            raise RunFolderError("in use")

    def contend(number: int) -> None:
        start.wait(120)
        try:
            won.append(open_term(store, f"127.0.0.1:{number}", refuse))
        except RunFolderError:
            refused.append(number)

    threads = [threading.Thread(target=contend, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(won) == 1
    assert len(refused) == 7
    assert won[0].number == 1


def test_the_question_wants_an_answer_signed_with_the_secret() -> None:
    async def refuse(generation: int, body: dict[str, Any]) -> dict[str, Any]:
        raise RuntimeError("broken on purpose")

    ask = holder_probe(SECRET, timeout_s=0.3)
    with serving() as service:
        # This service has no /term: an answer, but not one that is signed.
        assert probe_holder(service.address, SECRET, 3.0) is HolderReply.UNSIGNED
    assert probe_holder(service.address, SECRET, 3.0) is HolderReply.REFUSED
    with serving({TERM_PATH: refuse}) as service:
        assert ask(service.address)  # a refusal that is signed: somebody is there
    assert not ask("nonsense")
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        address = f"127.0.0.1:{deaf.getsockname()[1]}"
        assert probe_holder(address, SECRET, 0.3) is HolderReply.SILENT


def test_generations_open_once_and_in_order() -> None:
    store = MemoryStore()
    assert newest_generation(store) == 0
    create_generation(store, 1, {"reason": "start"})
    create_generation(store, 2, {})
    assert newest_generation(store) == 2
    assert json.loads(store.get(generation_key(1)))["reason"] == "start"
    for late in (1, 2):
        with pytest.raises(FencedError):
            create_generation(store, late, {})
    create_generation(store, 11, {})
    assert newest_generation(store) == 11


def test_a_term_that_no_parser_can_follow_is_held_by_no_holder_known() -> None:
    store = MemoryStore()
    store.create("terms/0000000001.json", b"[" * 100_000)
    assert newest_term(store) == (1, None)
    assert open_term(store, "host:1", _no_holder).number == 2


def test_strange_files_among_terms_and_generations_say_nothing() -> None:
    store = MemoryStore()
    create_generation(store, 3, {})
    open_term(store, "host:1", _no_holder)
    for folder in ("terms", "generations"):
        for name in ("notes.txt", "0000000009.json.bak", "zzz.json", "9.json"):
            store.create(f"{folder}/{name}", b"not ours\n")
    assert newest_generation(store) == 3
    number, holder = newest_term(store)
    assert number == 1
    assert holder is not None
    create_generation(store, 4, {})
