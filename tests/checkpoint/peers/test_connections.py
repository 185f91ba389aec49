"""Connections to senders, which are kept from one pull to the next."""

from __future__ import annotations

import socket

import pytest

from holdfast.checkpoint.peers import connections as module
from holdfast.checkpoint.peers.connections import QUICK_SECONDS, READ_BYTES, Offerers
from holdfast.errors import FencedError, HoldfastError
from holdfast.wire.secret import Secret

SECRET = Secret(bytes(range(32)))


def test_requests_grow_over_a_quick_link_and_shrink_over_a_slow_one() -> None:
    offerer = Offerers(SECRET).at("10.0.0.1:7000", 1, "run")
    assert offerer.room == 0, "one extent, to begin with"
    rooms = []
    for _ in range(8):
        offerer.took(QUICK_SECONDS / 2, max(offerer.room, 2**18))
        rooms.append(offerer.room)
    assert rooms == [2**19, 2**20, 2**21, 2**22, *[READ_BYTES] * 4]
    offerer.took(QUICK_SECONDS / 2, 1000)
    assert offerer.room == READ_BYTES, "what was small says nothing about a large one"
    offerer.took(2 * QUICK_SECONDS, READ_BYTES)
    assert offerer.room == READ_BYTES, "neither quick nor slow"
    offerer.took(5 * QUICK_SECONDS, READ_BYTES)
    assert offerer.room == READ_BYTES // 2


def test_a_generation_goes_on_with_what_the_one_before_has_found_out() -> None:
    offerers = Offerers(SECRET)
    first = offerers.at("10.0.0.1:7000", 1, "run")
    assert offerers.at("10.0.0.1:7000", 1, "run") is first
    first.took(0.0, 2**20)
    second = offerers.at("10.0.0.1:7000", 2, "run")
    assert (second.client.generation, second.room) == (2, 2**21)
    assert second.client is not first.client
    assert second.client.aim is first.client.aim
    assert offerers.at("10.0.0.1:7000", 2, "another").client.run == "another"
    assert offerers.at("10.0.0.2:7000", 2, "run").room == 0
    with pytest.raises(FencedError):
        offerers.at("10.0.0.2:7000", 1, "run")


def test_the_one_that_was_silent_longest_is_forgotten_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "SOURCES", 2)
    offerers = Offerers(SECRET)
    first, second = (offerers.at(f"10.0.0.{n}:7000", 1, "run") for n in (1, 2))
    offerers.at("10.0.0.1:7000", 1, "run")
    offerers.at("10.0.0.3:7000", 1, "run")
    assert offerers.at("10.0.0.1:7000", 1, "run") is first
    assert offerers.at("10.0.0.2:7000", 1, "run") is not second


def test_after_the_end_nobody_is_asked() -> None:
    """Also over a connection that another generation's has replaced."""
    offerers = Offerers(SECRET)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        clients = [offerers.at(address, number, "run").client for number in (1, 2)]
        offerers.close()
        with pytest.raises(HoldfastError, match="is ending"):
            offerers.at(address, 2, "run")
        for client in clients:
            with pytest.raises(HoldfastError, match="this end was closed"):
                client.newest()
