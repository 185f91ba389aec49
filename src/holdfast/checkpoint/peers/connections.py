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
from holdfast.wire.http.auth import ListenerIdentity
from holdfast.wire.secret import Secret

SENDER_SILENCE_TIMEOUT_S = 30.0
"""An offerer that sends nothing for so long is given up."""
MAX_SENDERS = 64
"""Offerers remembered at most; the one that has been silent longest goes first."""
MAX_REQUEST_BYTES = 8 * 2**20
"""Bytes that one request asks for at most. A request costs as much as some hundred KB, and the
bytes should still be in cache when they are checked."""
FAST_REQUEST_S = 0.05
"""Seconds; while requests take less, they grow. Over a slow link they stay at an extent or a few,
so that the next byte never takes long."""


@dataclass
class SenderConnection:
    """One address. Several pulls may share it."""

    client: PeerClient
    request_bytes: int = 0  # bytes that the next request may ask for; 0: one extent

    def record_request(self, seconds: float, nbytes: int) -> None:
        """A request for so many bytes has been answered in so long."""
        if seconds < FAST_REQUEST_S:
            self.request_bytes = min(MAX_REQUEST_BYTES, max(self.request_bytes, 2 * nbytes))
        elif seconds > 4 * FAST_REQUEST_S:
            self.request_bytes //= 2


class SenderConnections:
    """Safe to use from any thread."""

    def __init__(self, secret: Secret) -> None:
        self._secret = secret
        self._lock = threading.Lock()
        # by address, the latest last
        self._connections: OrderedDict[str, SenderConnection] = OrderedDict()
        # also replaced ones, while in use
        self._all_clients: weakref.WeakSet[PeerClient] = weakref.WeakSet()
        self._closed = False

    def connect(self, address: str, generation: int, run_id: str) -> SenderConnection:
        """Return the peer that offers from "host:port", in one generation of a run. Raises
        FencedError if it has offered in a newer one, HoldfastError after `close`, ValueError for an
        address of another form."""
        gone: list[PeerClient] = []
        with self._lock:
            if self._closed:
                raise HoldfastError("this mover is ending")
            found = self._connections.get(address)
            if found is None:
                aim = ListenerIdentity(time.time)
                found = SenderConnection(self._make_client(address, generation, run_id, aim))
            elif found.client.run_id == run_id and found.client.generation > generation:
                raise FencedError(f"{address} has offered in generation {found.client.generation}")
            elif (found.client.generation, found.client.run_id) != (generation, run_id):
                gone.append(found.client)
                client = self._make_client(
                    address, generation, run_id, found.client.listener_identity
                )
                found = SenderConnection(client, found.request_bytes)
            self._connections[address] = found
            self._connections.move_to_end(address)
            while len(self._connections) > MAX_SENDERS:
                gone.append(self._connections.popitem(last=False)[1].client)
        for client in gone:
            client.close()
        return found

    def close(self) -> None:
        """End what is under way."""
        with self._lock:
            self._closed, clients = True, list(self._all_clients)
            self._connections.clear()
        for client in clients:
            client.abort()

    def _make_client(
        self, address: str, generation: int, run_id: str, aim: ListenerIdentity
    ) -> PeerClient:
        client = PeerClient(
            address,
            self._secret,
            generation,
            run_id,
            silence_timeout_s=SENDER_SILENCE_TIMEOUT_S,
            listener_identity=aim,
        )
        self._all_clients.add(client)
        return client
