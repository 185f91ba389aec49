"""The peers that offer copies to this mover, and the connections to them, which stay open.

A state of a few MB is sent every step. A new connection, and the request for the listener's name,
would cost more than the bytes. The best size of one request over this link was measured before. So
all three are kept from one pull to the next.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import OrderedDict
from dataclasses import dataclass

from holdfast.checkpoint.peers.client import PeerClient
from holdfast.errors import FencedError, HoldfastError
from holdfast.wire.http.auth import Aim
from holdfast.wire.secret import Secret

SILENCE_SECONDS = 30.0
"""An offerer that sends nothing for so long is given up."""
SOURCES = 64
"""Offerers remembered at most; the one that has been silent longest goes first."""
READ_BYTES = 8 * 2**20
"""Bytes that one request asks for at most. A request costs as much as some hundred KB, and the
bytes should still be in cache when they are checked."""
QUICK_SECONDS = 0.05
"""Seconds; while requests take less, they grow. Over a slow link they stay at an extent or a few,
so that the next byte never takes long."""


@dataclass
class Offerer:
    """One address. Several pulls may share it."""

    client: PeerClient
    room: int = 0  # bytes that the next request may ask for; 0: one extent

    def took(self, seconds: float, nbytes: int) -> None:
        """A request for so many bytes has been answered in so long."""
        if seconds < QUICK_SECONDS:
            self.room = min(READ_BYTES, max(self.room, 2 * nbytes))
        elif seconds > 4 * QUICK_SECONDS:
            self.room //= 2


class Offerers:
    """Safe to use from any thread."""

    def __init__(self, secret: Secret) -> None:
        self._secret = secret
        self._lock = threading.Lock()
        self._known: OrderedDict[str, Offerer] = OrderedDict()  # by address, the latest last
        self._all: weakref.WeakSet[PeerClient] = (
            weakref.WeakSet()
        )  # also replaced ones, while in use
        self._closed = False

    def at(self, address: str, generation: int, run: str) -> Offerer:
        """Return the peer that offers from "host:port", in one generation of a run. Raises
        FencedError if it has offered in a newer one, HoldfastError after `close`, ValueError for an
        address of another form."""
        gone: list[PeerClient] = []
        with self._lock:
            if self._closed:
                raise HoldfastError("this mover is ending")
            found = self._known.get(address)
            if found is None:
                aim = Aim(time.time)
                found = Offerer(self._client(address, generation, run, aim))
            elif found.client.run == run and found.client.generation > generation:
                raise FencedError(f"{address} has offered in generation {found.client.generation}")
            elif (found.client.generation, found.client.run) != (generation, run):
                gone.append(found.client)
                client = self._client(address, generation, run, found.client.aim)
                found = Offerer(client, found.room)
            self._known[address] = found
            self._known.move_to_end(address)
            while len(self._known) > SOURCES:
                gone.append(self._known.popitem(last=False)[1].client)
        for client in gone:
            client.close()
        return found

    def close(self) -> None:
        """End what is under way."""
        with self._lock:
            self._closed, clients = True, list(self._all)
            self._known.clear()
        for client in clients:
            client.abort()

    def _client(self, address: str, generation: int, run: str, aim: Aim) -> PeerClient:
        client = PeerClient(
            address, self._secret, generation, run, timeout=SILENCE_SECONDS, aim=aim
        )
        self._all.add(client)
        return client
