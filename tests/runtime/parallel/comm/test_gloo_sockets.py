"""One gloo group is given up: whoever waits in it is woken, and no other connection is touched."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from holdfast.parallel.comm.gloo_sockets import (
    address_from_text,
    address_to_text,
    cut_connections,
    listening_addresses,
    received_bytes,
)
from holdfast.parallel.comm.transport import PeerGroup
from tests.support.ranks import RankContext, rank_values

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="no list of descriptors")


class Gathering(Store):
    """A store of the tests that answers as the coordinator's does: all values at once."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self._inner = inner

    def gather(
        self, key: str, value: bytes, keys: Sequence[str], timeout: timedelta
    ) -> list[bytes]:
        self._inner.set(key, value)
        return [bytes(self._inner.get(each)) for each in keys]


def _given_up(rank: RankContext) -> list[bool]:
    store = Gathering(rank.store())
    old = PeerGroup(store, "old", rank.rank, 3, seconds=120)
    other = PeerGroup(store, "other", rank.rank, 3, seconds=120)
    woken: list[bool] = []

    def wait() -> None:
        try:
            old.receive(torch.empty(1), int(rank.rank == 0), tag=7).wait()  # or the one who goes
        except RuntimeError:
            woken.append(True)

    waiting = threading.Thread(target=wait)
    waiting.start()
    if rank.rank == 0:
        old.abort()
        old.abort()  # of one that is given up already
    waiting.join(120)
    value = torch.ones(1)
    other.all_reduce(value).wait()
    return [bool(woken), float(value) == 3.0, old._addresses is not None]


@on_linux
def test_who_waits_in_a_group_that_one_gives_up_is_woken_and_other_groups_go_on() -> None:
    assert rank_values(_given_up, 3) == [[True, True, True]] * 3


@on_linux
def test_only_the_connections_of_these_addresses_are_cut() -> None:
    with socket.create_server(("127.0.0.1", 0)) as ours, socket.create_server(("", 0)) as theirs:
        own, other = ours.getsockname()[:2], theirs.getsockname()[:2]
        assert {own, other} <= listening_addresses()
        dialled = socket.create_connection(own)
        came, _ = ours.accept()
        bystander = socket.create_connection(("127.0.0.1", other[1]))
        beside, _ = theirs.accept()
        with dialled, came, bystander, beside:
            cut_connections(own, ())
            assert dialled.recv(1) == b""
            bystander.sendall(b"x")
            assert beside.recv(1) == b"x"
            cut_connections(("127.0.0.1", 1), [("127.0.0.1", other[1])])
            assert beside.recv(1) == b""
        with socket.create_connection(own), ours.accept()[0]:
            pass  # whoever listens goes on


@on_linux
def test_what_has_come_of_a_message_counts_before_its_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as ours:
        own = ours.getsockname()[:2]
        with socket.create_connection(own) as dialled, ours.accept()[0] as came:
            dialled.sendall(bytes(700))
            came.recv(700, socket.MSG_WAITALL)
            assert received_bytes(own, ()) == 700  # the side that was dialled
            came.sendall(bytes(50))
            dialled.recv(50, socket.MSG_WAITALL)
            assert received_bytes(("127.0.0.1", 1), [own]) == 50
            assert received_bytes(("127.0.0.1", 1), ()) == 0


def test_addresses_travel_as_a_line() -> None:
    assert address_from_text(address_to_text(("127.0.0.1", 80))) == ("127.0.0.1", 80)
    assert address_from_text(address_to_text(("fe80::1", 80))) == ("fe80::1", 80)
    assert address_from_text(address_to_text(None)) is None
