"""Connections to senders, which are kept from one pull to the next."""

from __future__ import annotations

import socket

import pytest

from holdfast.checkpoint.peers import connections as module
from holdfast.checkpoint.peers.connections import (
    FAST_REQUEST_S,
    MAX_REQUEST_BYTES,
    SenderConnections,
)
from holdfast.errors import FencedError, HoldfastError
from holdfast.wire.secret import Secret

SECRET = Secret(bytes(range(32)))


def test_requests_grow_over_a_quick_link_and_shrink_over_a_slow_one() -> None:
    offerer = SenderConnections(SECRET).connect("10.0.0.1:7000", 1, "run")
    assert offerer.request_bytes == 0, "one extent, to begin with"
    rooms = []
    for _ in range(8):
        offerer.record_request(FAST_REQUEST_S / 2, max(offerer.request_bytes, 2**18))
        rooms.append(offerer.request_bytes)
    assert rooms == [2**19, 2**20, 2**21, 2**22, *[MAX_REQUEST_BYTES] * 4]
    offerer.record_request(FAST_REQUEST_S / 2, 1000)
    assert offerer.request_bytes == MAX_REQUEST_BYTES, (
        "what was small says nothing about a large one"
    )
    offerer.record_request(2 * FAST_REQUEST_S, MAX_REQUEST_BYTES)
    assert offerer.request_bytes == MAX_REQUEST_BYTES, "neither quick nor slow"
    offerer.record_request(5 * FAST_REQUEST_S, MAX_REQUEST_BYTES)
    assert offerer.request_bytes == MAX_REQUEST_BYTES // 2


def test_a_generation_goes_on_with_what_the_one_before_has_found_out() -> None:
    offerers = SenderConnections(SECRET)
    first = offerers.connect("10.0.0.1:7000", 1, "run")
    assert offerers.connect("10.0.0.1:7000", 1, "run") is first
    first.record_request(0.0, 2**20)
    second = offerers.connect("10.0.0.1:7000", 2, "run")
    assert (second.client.generation, second.request_bytes) == (2, 2**21)
    assert second.client is not first.client
    assert second.client.listener_identity is first.client.listener_identity
    assert offerers.connect("10.0.0.1:7000", 2, "another").client.run_id == "another"
    assert offerers.connect("10.0.0.2:7000", 2, "run").request_bytes == 0
    with pytest.raises(FencedError):
        offerers.connect("10.0.0.2:7000", 1, "run")


def test_the_one_that_was_silent_longest_is_forgotten_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_SENDERS", 2)
    offerers = SenderConnections(SECRET)
    first, second = (offerers.connect(f"10.0.0.{n}:7000", 1, "run") for n in (1, 2))
    offerers.connect("10.0.0.1:7000", 1, "run")
    offerers.connect("10.0.0.3:7000", 1, "run")
    assert offerers.connect("10.0.0.1:7000", 1, "run") is first
    assert offerers.connect("10.0.0.2:7000", 1, "run") is not second


def test_after_the_end_nobody_is_asked() -> None:
    """Also over a connection that another generation's has replaced."""
    offerers = SenderConnections(SECRET)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        clients = [offerers.connect(address, number, "run").client for number in (1, 2)]
        offerers.close()
        with pytest.raises(HoldfastError, match="is ending"):
            offerers.connect(address, 2, "run")
        for client in clients:
            with pytest.raises(HoldfastError, match="this end was closed"):
                client.newest_generation()
