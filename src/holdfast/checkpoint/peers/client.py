"""Requests between movers of different machines: HTTP/1.1, every request signed, bytes by range.

    GET  /inventory?run=R                 what the shelf holds, and the plans to merge it
    GET  /range?run=R&key=K&start=A&stop=B&use=copy|restore     bytes [A, B) of a snapshot's blob
    POST /offer?run=R                     "I have a new snapshot": the receiver pulls it
    GET  /newest?run=R                    the newest generation that has asked here; fences no node
    POST /save?run=R                      to the committing mover: what was stored
                                          (`commit_protocol.py`)

R says what is computed (`identity`). Movers that share a secret may belong to different runs, and
the state of one is of no use to the other. Proofs are those of `wire.http.auth`, in the same
headers as everywhere; the path with its query is signed, and so is every answer. Of a range, the
signature covers only its position. The client checks the bytes against the checksums of extents in
a part manifest that came signed. A copy spends the sender's budget, a restore does not: a restoring
rank is not training.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from holdfast.checkpoint.peers.messages import Inventory, NewestReply, Offer, OfferReply
from holdfast.core.json_parsing import JsonObject, parse_json
from holdfast.errors import FencedError, HoldfastError
from holdfast.wire.http.auth import (
    MISDIRECTED_STATUS,
    AuthError,
    ListenerIdentity,
    check_answer,
    request_headers,
)
from holdfast.wire.http.connection_pool import ConnectionPool
from holdfast.wire.http.sync_connection import ClientResponse, SyncConnection
from holdfast.wire.http.tls import UPGRADE_STATUS, wants_tls
from holdfast.wire.secret import Secret
from holdfast.wire.store.run_store import MissingKeyError

if TYPE_CHECKING:
    import ssl

INVENTORY_PATH, RANGE_PATH, OFFER_PATH, NEWEST = "/inventory", "/range", "/offer", "/newest"
USE_COPY, USE_RESTORE = "copy", "restore"
PROOF_HEADER = "holdfast-hmac"
MAX_INVENTORY_BYTES = 1 << 30
"""Bytes of an inventory at most: that of a large run."""
MAX_ANSWER_BYTES = 1 << 20
"""Bytes at most of any other answer in JSON, and of a refusal. They are read before the sender is
known: another process may have the port of a mover that has exited."""

CONNECT_TIMEOUT_S = 5.0
"""A machine that is there takes a connection within this time, and acknowledges what is sent."""
IDLE_REUSE_LIMIT_S = 50.0
"""A connection that was idle for so long is not used again: the listener is about to close it."""

OK, REFUSED, UNKNOWN, MISSING, FENCED, TOO_LONG, FAILED = 200, 400, 401, 404, 409, 413, 500


class PeerError(HoldfastError):
    """A mover on another machine does not answer, breaks off, or refuses; names its address."""


class PeerClient:
    """Requests of one generation to one mover. Threads may share it."""

    def __init__(
        self,
        address: str,
        secret: Secret,
        generation: int,
        run_id: str = "",
        *,
        silence_timeout_s: float = 10.0,
        clock: Callable[[], float] = time.time,
        listener_identity: ListenerIdentity | None = None,
    ) -> None:
        """`address` is "host:port"; `silence_timeout_s` bounds every silence, in seconds.
        `listener_identity`: what an earlier client of the same address has learned; it spares a
        question.

        Raises ValueError for an address of another form.
        """
        self.address = address
        self.generation = generation
        self.run_id = run_id
        self.listener_identity = listener_identity or ListenerIdentity(clock)
        self._secret = secret
        self._silence_timeout_s = silence_timeout_s
        self._connections = ConnectionPool(
            partial(_connect, address, *split_address(address), secret.client_tls),
            IDLE_REUSE_LIMIT_S,
        )

    def inventory(self) -> Inventory:
        """Return the contents of the other snapshot store. Raises PeerError, AuthError,
        FencedError, and KeyError, TypeError, ValueError for an answer that makes no sense."""
        value = self._request_json(
            "GET", self._with_query(INVENTORY_PATH), b"", max_bytes=MAX_INVENTORY_BYTES
        )
        return Inventory.from_json(value)

    def newest_generation(self) -> int:
        """The newest generation of the run that ever asked there, 0 for none; whatever this
        client's own is. Raises as `inventory` does."""
        value = self._request_json("GET", self._with_query(NEWEST), b"")
        return int(NewestReply.from_json(value).generation)

    def send_offer(self, offer: Offer) -> OfferReply:
        """Tell of a snapshot. Raises as `inventory` does."""
        return OfferReply.from_json(self.post(OFFER_PATH, offer.to_json()))

    def post(self, path: str, body: JsonObject, timeout: float | None = None) -> JsonObject:
        """Any question with a body, by its path. `timeout` bounds the silence of this one request.
        Raises as `inventory` does."""
        content = json.dumps(body, separators=(",", ":")).encode()
        return self._request_json("POST", self._with_query(path), content, timeout)

    def read_into(self, key: str, start: int, out: memoryview, use: str = USE_RESTORE) -> None:
        """Fill `out` with bytes [start, start + len(out)) of a blob, straight from the socket.

        Raises MissingKeyError when the peer does not hold it (any more), and as `inventory` does.
        The bytes are not checked here.
        """
        self.scatter(key, start, [out.cast("B")], use)

    def scatter(
        self, key: str, start: int, outs: Sequence[memoryview], use: str = USE_RESTORE
    ) -> None:
        """Read as `read_into` does, into several buffers of bytes, one after the other."""
        due = sum(map(len, outs))
        path = self._with_query(RANGE_PATH, key=key, start=start, stop=start + due, use=use)

        def take(answer: ClientResponse, nonce: str, proof: str) -> None:
            check_answer(self._secret, nonce, OK, path.encode(), proof)
            if answer.length != due:
                raise PeerError(f"{self.address} answers {answer.length} of {due} bytes")
            done = 0
            for target in outs:
                at = 0
                while at < len(target):
                    count = answer.readinto(target[at:])
                    if not count:
                        raise PeerError(f"{self.address} broke off after {done} bytes of {key}")
                    at += count
                    done += count

        self._request("GET", path, b"", take)

    def close(self) -> None:
        """Keep no connection open any more: what is under way ends, and its connection with it."""
        self._connections.close()

    def abort(self) -> None:
        """End what is under way, in other threads, and refuse anything more."""
        self._connections.abort()

    def _with_query(self, path: str, **query: object) -> str:
        return f"{path}?{urlencode({'run': self.run_id, **query})}"

    # --- the exchange -----------------------------------------------------------------------
    def _request_json(
        self,
        method: str,
        path: str,
        body: bytes,
        timeout: float | None = None,
        max_bytes: int = MAX_ANSWER_BYTES,
    ) -> JsonObject:
        found: list[bytes] = []

        def take(answer: ClientResponse, nonce: str, proof: str) -> None:
            data = answer.read(max_bytes)
            check_answer(self._secret, nonce, OK, data, proof)
            found.append(data)

        self._request(method, path, body, take, timeout)
        with suppress(ValueError):
            value = parse_json(found[0])
            if isinstance(value, dict):
                return value
        raise PeerError(f"{self.address} answers something that is no object")

    def _request(
        self,
        method: str,
        path: str,
        body: bytes,
        read_answer: Callable[[ClientResponse, str, str], None],
        timeout: float | None = None,
    ) -> None:
        """One request; once more where it was signed for another listener, and so not done."""
        if not any(self._request_once(method, path, body, read_answer, timeout) for _ in range(2)):
            raise PeerError(f"{self.address} changes its name at every request")

    def _request_once(
        self,
        method: str,
        path: str,
        body: bytes,
        read_answer: Callable[[ClientResponse, str, str], None],
        timeout: float | None = None,
    ) -> bool:
        """One request; where the connection is cut before an answer (it was idle for long, or had
        to make way), once more. Every request may arrive twice: an offer that is known already is
        answered, not done again. Return False if it was signed for another listener; now the right
        one is known."""
        bound = self._silence_timeout_s if timeout is None else timeout
        is_retry, answer = False, None
        while True:
            try:
                with self._connections.lend(bound, is_retry) as connection:
                    proof = self.listener_identity.sign(
                        self._secret, method, path, body, self.generation
                    )
                    answer = connection.request(method, path, request_headers(proof, body), body)
                    is_ours = self._check_status(answer, proof.nonce)
                    if is_ours:
                        read_answer(answer, proof.nonce, answer.header(PROOF_HEADER))
                    return is_ours
            except OSError as error:
                if answer is not None:
                    raise PeerError(f"{self.address} broke off: {_error_text(error)}") from error
                self._connections.close_idle()  # they are likely to be as dead
                if is_retry or isinstance(error, TimeoutError):
                    raise PeerError(
                        f"{self.address} does not answer: {_error_text(error)}"
                    ) from error
                is_retry = True

    def _check_status(self, answer: ClientResponse, nonce: str) -> bool:
        """Return False if the request was signed for another listener. Raises what a refusal says,
        if it is the peer that says it."""
        if answer.status == OK:
            return True
        if answer.status == UNKNOWN:
            raise AuthError(f"{self.address} does not accept this run's secret")
        if answer.status == UPGRADE_STATUS:
            raise AuthError(wants_tls(self.address))
        data = answer.read(MAX_ANSWER_BYTES)
        check_answer(self._secret, nonce, answer.status, data, answer.header(PROOF_HEADER))
        if answer.status == MISDIRECTED_STATUS:
            self.listener_identity.update_from(parse_json(data))
            return False
        text = str(parse_json(data).get("error", f"status {answer.status}"))
        kinds = {FENCED: FencedError, MISSING: MissingKeyError}
        kind = kinds.get(answer.status)
        raise kind(text) if kind else PeerError(f"{self.address} refuses: {text}")


def _connect(
    address: str, host: str, port: int, tls: ssl.SSLContext | None, timeout: float
) -> SyncConnection:
    """Raises PeerError, AuthError."""
    try:
        connection = SyncConnection(host, port, min(timeout, CONNECT_TIMEOUT_S), tls)
    except OSError as error:
        raise PeerError(f"{address} cannot be reached: {_error_text(error)}") from error
    sock = connection.sock
    # A machine that has vanished sends no reset: over a connection that was open before, it is
    # missed as soon as over a new one.
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        milliseconds = int(1000 * CONNECT_TIMEOUT_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, int(CONNECT_TIMEOUT_S))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, int(CONNECT_TIMEOUT_S))
    return connection


def run_identity(config_hash: str, dataset_version: str) -> str:
    """Return the identity of a run's computation: the state after a step depends on nothing
    else."""
    return f"{config_hash}-{dataset_version}"


def split_address(address: str, min_port: int = 1) -> tuple[str, int]:
    """(host, port) of "host:port", the host in brackets for IPv6; `min_port` is the smallest port.

    Raises ValueError.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not min_port <= int(port) < 65536:
        raise ValueError(f"{address!r} is not an address of the form host:port")
    return host.strip("[]"), int(port)


def _error_text(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error) or type(error).__name__
