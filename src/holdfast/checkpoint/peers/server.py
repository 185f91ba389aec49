"""The mover's listener for movers of other machines: serves snapshots by range, takes offers.

One thread a connection. The head of a request is bounded, and alone proves its sender. Only then is
a body read, and compared with what the head says of it. Next, the generation is compared with the
newest that was ever seen here. An older one is fenced. A newer one, which only a holder of the
run's secret can name, becomes the newest. So after a client has opened a generation and requested
the inventory, nothing older can be added.

A range leaves by sendfile(2), from the memory file to the socket. The slot's header is compared
before and after. If the slot has changed meanwhile, the connection is cut. Should that come too
late, the receiver's checksums show it.

An outsider can only hold a connection for a few seconds and make us read a few KiB. When all
connections are taken, the oldest one that has proven nothing is closed.
"""

from __future__ import annotations

import json
import os
import select
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Protocol
from urllib.parse import parse_qs, urlsplit

from holdfast.checkpoint.memory.snapshot_store import Snapshot, SnapshotStore
from holdfast.checkpoint.peers.client import (
    FAILED,
    FENCED,
    INVENTORY_PATH,
    MISSING,
    NEWEST,
    OFFER_PATH,
    OK,
    PROOF_HEADER,
    RANGE_PATH,
    REFUSED,
    TOO_LONG,
    UNKNOWN,
    USE_COPY,
)
from holdfast.checkpoint.peers.rate_limiter import TokenBucket
from holdfast.core.format.manifest import parse_blob_key
from holdfast.core.json_parsing import parse_json
from holdfast.errors import FencedError, HoldfastError
from holdfast.wire.http.auth import (
    BODY_HEADER,
    MISDIRECTED_STATUS,
    AuthError,
    MisdirectedError,
    Proof,
    Verifier,
    body_statement,
    sha256_hex,
    sign_answer,
)
from holdfast.wire.http.refusals import PEERS, RefusalReason, Refusals
from holdfast.wire.http.sync_connection import (
    HttpFormatError,
    ParsedRequest,
    SocketReader,
    end_both_ways,
    parse_request,
)
from holdfast.wire.http.tls import is_tls, listener_context, shake_hands, tls_errors
from holdfast.wire.secret import Secret
from holdfast.wire.store.run_store import MissingKeyError

MAX_CONNECTIONS = 64
PROOF_TIMEOUT_S = 10.0
"""A connection that has proven nothing for so long is cut."""
IDLE_CONNECTION_TIMEOUT_S = 60.0
STALLED_RECEIVER_TIMEOUT_S = 20.0
"""A receiver that takes nothing for so long is given up."""
MAX_BODY_BYTES = 64 << 20
"""Bytes of an offer at most: the manifest of a part, and the state table."""
LENGTH_HEADER = "content-length"
SEND_PIECE_BYTES = 1 << 20
"""Bytes that leave at a time: the grain of the budget."""
ENCRYPTED_PIECE_BYTES = 256 << 10
"""Bytes that are copied and encrypted at a time; they stay in the processor's cache."""


class OfferReceiver(Protocol):
    """The object that answers offers: `receiver.SnapshotReceiver`."""

    @property
    def is_idle(self) -> bool:
        """True if nothing is kept, nor about to be."""
        ...

    def answer_offer(self, generation: int, body: dict[str, Any]) -> dict[str, Any]: ...


class PeerServer(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Serves one shelf on a socket that is bound already."""

    daemon_threads = True
    block_on_close = False

    def __init__(
        self,
        bound_socket: socket.socket,
        secret: Secret,
        snapshot_store: SnapshotStore,
        receiver: OfferReceiver,
        rate_limiter: TokenBucket,
        run_id: str | None,
        *,
        clock: Callable[[], float] = time.time,
        max_connections: int = MAX_CONNECTIONS,
        proof_timeout_s: float = PROOF_TIMEOUT_S,
        wait_until_hashed: Callable[[], object] = lambda: None,
        refusals: Refusals | None = None,
    ) -> None:
        """`run_id`: whose snapshots lie here (`identity`); None: of whichever run speaks first,
        until nothing of it is kept any more. `wait_until_hashed` waits, for a moment, for what is
        being hashed: it belongs into the inventory."""
        super().__init__(bound_socket.getsockname()[:2], _PeerHandler, bind_and_activate=False)
        self.socket.close()  # the one that the base class made
        bound_socket.setblocking(True)
        self.socket = bound_socket
        self.secret, self.snapshot_store, self.receiver, self.rate_limiter = (
            secret,
            snapshot_store,
            receiver,
            rate_limiter,
        )
        self.verifier = Verifier(secret, clock)
        self.tls = listener_context(secret)
        self.wait_until_hashed = wait_until_hashed
        self.refusals = refusals or Refusals()
        self.post_handlers: dict[str, Callable[[int, dict[str, Any]], dict[str, Any]]] = {}
        """More that is answered, by path: given the generation of who asks, and a JSON object."""
        self.sent_bytes = 0  # bytes of ranges, for the status
        self._max_connections, self._proof_timeout_s = max_connections, proof_timeout_s
        # oldest first; whether it has proven itself
        self._open_connections: dict[socket.socket, bool] = {}
        self._opened_at: dict[socket.socket, float] = {}  # when it came
        # proven, and nothing asked; the longest first
        self._idle_connections: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        self._newest_generation = 0
        self._run_id, self._is_bound_to_run = run_id, run_id is not None

    def start(self) -> None:
        threading.Thread(target=self.serve_forever, args=(0.5,), name="peers", daemon=True).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def admit_request(self, run_id: str, generation: int) -> None:
        """Raises FencedError for a generation older than the newest one seen, and ValueError for
        another run's."""
        with self._lock:
            if run_id != self._run_id:
                if self._is_bound_to_run or not self.receiver.is_idle:
                    raise ValueError("the snapshots of another run are kept here")
                self._run_id, self._newest_generation = run_id, 0
            if generation < self._newest_generation:
                raise FencedError(
                    f"generation {generation} is over: {self._newest_generation} rules"
                )
            self._newest_generation = generation

    def advance_generation(self, generation: int) -> None:
        """This mover's own agent has opened a generation."""
        with self._lock:
            self._newest_generation = max(self._newest_generation, generation)

    @property
    def newest_generation(self) -> int:
        with self._lock:
            return self._newest_generation

    def newest_generation_of(self, run_id: str) -> int:
        """The newest generation of a run that ever asked here; 0 for a run that is not known."""
        with self._lock:
            return self._newest_generation if run_id == self._run_id else 0

    # --- connections ------------------------------------------------------------------------
    def get_request(self) -> tuple[Any, Any]:
        """With TLS, the handshake is left to the connection's thread."""
        connection, address = super().get_request()
        if self.tls is not None:
            connection = self.tls.wrap_socket(
                connection, server_side=True, do_handshake_on_connect=False
            )
        return connection, address

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open_connections[request], self._opened_at[request] = False, time.monotonic()
            strangers = [one for one in self._unproven_connections() if one is not request]
            crowd = [*strangers, *self._idle_connections, request, *self._open_connections]
            while len(self._open_connections) > self._max_connections:
                # of ours, who comes again when it is needed
                if crowd[0] not in self._idle_connections:
                    self.refusals.count(PEERS, "crowded")
                self._cut_connection(crowd.pop(0))
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Close connections that proved nothing in time; called between two connections, and twice
        a second."""
        late = time.monotonic() - self._proof_timeout_s
        with self._lock:
            for connection in self._unproven_connections():
                if self._opened_at[connection] < late:
                    self.refusals.count(PEERS, "slow")
                    self._cut_connection(connection)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open_connections.pop(request, None)
            self._opened_at.pop(request, None)
            self._idle_connections.pop(request, None)
        super().shutdown_request(request)

    def _unproven_connections(self) -> list[socket.socket]:
        return [connection for connection, proven in self._open_connections.items() if not proven]

    def mark_proven(self, connection: socket.socket) -> None:
        with self._lock:
            if connection in self._open_connections:
                self._open_connections[connection] = True
                self._idle_connections.pop(connection, None)

    def mark_idle(self, connection: socket.socket) -> None:
        """Nothing is under way over a connection that has proven itself."""
        with self._lock:
            if self._open_connections.get(connection):
                self._idle_connections[connection] = None

    def _cut_connection(self, connection: socket.socket) -> None:
        if self._open_connections.pop(connection, None) is not None:
            self._opened_at.pop(connection, None)
            self._idle_connections.pop(connection, None)
            try:
                end_both_ways(connection)  # wakes the thread that reads from it
            except OSError:
                return

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A broken connection is no news."""


class _PeerHandler(socketserver.BaseRequestHandler):
    """One connection."""

    server: PeerServer
    request: Any  # a socket; one of TLS if the server has that
    _asked_request: ParsedRequest

    def handle(self) -> None:
        self.request.settimeout(IDLE_CONNECTION_TIMEOUT_S)
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._incoming, self._closes_connection = SocketReader(self.request), False
        if self.server.tls is not None:
            if (reason := shake_hands(self.request)) is not None:
                self.server.refusals.count(PEERS, reason)
                return
        elif is_tls(self.request.recv(1, socket.MSG_PEEK)):  # it would wait for our hello
            self._refuse(REFUSED, "not ours")
            return
        while not self._closes_connection:
            try:
                head = self._incoming.read_head()
                if not head:
                    return
                self._asked_request = parse_request(head)
            except (HttpFormatError, ValueError):  # this sender learns no more than any other
                self._refuse(REFUSED, "not ours")
                return
            except tls_errors(self.request):
                self.server.refusals.count(PEERS, "not TLS")
                return
            self._closes_connection = not self._asked_request.keeps_alive
            match self._asked_request.method:
                case "GET":
                    self._handle_get()
                case "POST":
                    self._handle_post()
                case _:
                    self._refuse(HTTPStatus.NOT_IMPLEMENTED, "not ours")
            self.server.mark_idle(self.request)

    def _handle_get(self) -> None:
        if self._body_length() != 0:
            self._refuse(REFUSED, "malformed")
            return
        proof = self._check_proof(b"")
        if proof is not None:
            self._answer_request(proof, b"")

    def _handle_post(self) -> None:
        length, digest = self._body_length(), self._asked_request.headers.get(BODY_HEADER, "")
        if length is None or length > MAX_BODY_BYTES:
            self._refuse(TOO_LONG, "malformed" if length is None else "too long")
            return
        proof = self._check_proof(body_statement(length, digest))
        if proof is None:
            return
        body = self._incoming.read(length)
        if body and sha256_hex(body) != digest:
            self._refuse(UNKNOWN, "wrong proof")
            return
        self._answer_request(proof, body)

    def _body_length(self) -> int | None:
        """Bytes of the body; None where that is not said, or not in one way."""
        headers = self._asked_request.headers
        if "transfer-encoding" in headers or LENGTH_HEADER in self._asked_request.repeated:
            return None
        length = headers.get(LENGTH_HEADER, "" if self._asked_request.method == "POST" else "0")
        return int(length) if length.isdecimal() and len(length) < 16 else None

    def _check_proof(self, covered_bytes: bytes) -> Proof | None:
        """Return the checked proof of the head. Without a valid one, answer the request and return
        None."""
        asked = self._asked_request
        try:
            proof = Proof.from_headers(asked.headers, asked.repeated)
            self.server.verifier.check(asked.method, asked.target, covered_bytes, proof)
        except MisdirectedError as error:
            if error.fault != "first contact":
                self.server.refusals.count(PEERS, error.fault)
            self._answer_misdirected(proof, len(covered_bytes) > 0)
            return None
        except AuthError as error:
            self._refuse(UNKNOWN, error.fault)
            return None
        self.server.mark_proven(self.request)
        return proof

    def _answer_misdirected(self, proof: Proof, close_connection: bool) -> None:
        """`close_connection`: a body follows, which is not read."""
        self._closes_connection = self._closes_connection or close_connection
        self._send_signed(proof, MISDIRECTED_STATUS, self.server.verifier.misdirected_answer())

    def _refuse(self, status: int, reason: RefusalReason) -> None:
        self.server.refusals.count(PEERS, reason)
        self._closes_connection = True
        self.request.sendall(self._response_head(status, 0, ""))

    def _answer_request(self, proof: Proof, body: bytes) -> None:
        value: dict[str, Any]
        try:
            parts = urlsplit(self._asked_request.target)
            asked = {key: found[-1] for key, found in parse_qs(parts.query).items()}
            if parts.path != NEWEST:
                self.server.admit_request(asked.get("run", ""), proof.generation)
            if (self._asked_request.method, parts.path) == ("GET", RANGE_PATH):
                self._send_range(proof.nonce, asked)
                return
            if (self._asked_request.method, parts.path) == ("GET", NEWEST):
                status, value = (
                    OK,
                    {"generation": self.server.newest_generation_of(asked.get("run", ""))},
                )
            else:
                status, value = OK, self._answer_value(parts.path, proof.generation, body)
        except FencedError as error:
            self.server.refusals.count(PEERS, "older generation")
            status, value = FENCED, {"error": str(error)}
        except MissingKeyError as error:
            status, value = MISSING, {"error": str(error)}
        except (HoldfastError, ValueError, KeyError, TypeError) as error:
            status, value = REFUSED, {"error": f"{type(error).__name__}: {error}"}
        except Exception as error:  # a broken connection, or our own bug
            if isinstance(error, OSError):
                raise
            status, value = FAILED, {"error": f"{type(error).__name__}: {error}"}
        self._send_signed(proof, status, value)

    def _send_signed(self, proof: Proof, status: int, value: dict[str, Any]) -> None:
        content = json.dumps(value, separators=(",", ":")).encode()
        digest = sign_answer(self.server.secret, proof.nonce, status, content)
        self.request.sendall(self._response_head(status, len(content), digest) + content)

    def _answer_value(self, path: str, generation: int, body: bytes) -> dict[str, Any]:
        if (self._asked_request.method, path) == ("GET", INVENTORY_PATH):
            self.server.wait_until_hashed()
            return inventory_to_json(self.server.snapshot_store)
        verb = (
            self.server.receiver.answer_offer
            if path == OFFER_PATH
            else self.server.post_handlers.get(path)
        )
        if self._asked_request.method == "POST" and verb is not None:
            value = parse_json(body)
            if not isinstance(value, dict):
                raise ValueError("the body is not a JSON object")
            return verb(generation, value)
        raise MissingKeyError(f"there is nothing to ask at {self._asked_request.target[:80]!r}")

    # --- bytes ------------------------------------------------------------------------------
    def _send_range(self, nonce: str, asked: dict[str, str]) -> None:
        """Answer with bytes of a slot; what goes wrong before the first of them is raised."""
        start, stop = int(asked["start"]), int(asked["stop"])
        place = parse_blob_key(asked["key"])
        if place is None:
            raise ValueError(f"{asked['key']!r} is not the key of a blob")
        found = self.server.snapshot_store.get(*place)
        if not 0 <= start < stop <= found.header.length:
            raise ValueError(f"bytes [{start}, {stop}) of {found.header.length}")
        proof = sign_answer(self.server.secret, nonce, OK, self._asked_request.target.encode())
        self.request.sendall(
            self._response_head(OK, stop - start, proof, "application/octet-stream")
        )
        if not self._send_slot(found, start, stop, is_rate_limited=asked.get("use") == USE_COPY):
            self._closes_connection = True
            end_both_ways(self.request)

    def _send_slot(self, snapshot: Snapshot, start: int, stop: int, is_rate_limited: bool) -> bool:
        """Send a slot's range; return True if it held the snapshot until the last piece was
        sent."""
        at = snapshot.memory.arena.data_offset(snapshot.slot)
        while start < stop:
            piece = min(SEND_PIECE_BYTES, stop - start)
            if is_rate_limited:
                self.server.rate_limiter.take(piece)
            if not snapshot.is_intact:
                return False
            send = _send_file if self.server.tls is None else _send_encrypted
            send(self.request, snapshot.memory.fd, at + start, piece)
            self.server.sent_bytes += piece
            start += piece
        return snapshot.is_intact

    def _response_head(
        self, status: int, length: int, proof: str, kind: str = "application/json"
    ) -> bytes:
        lines = [
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
            f"content-type: {kind}",
            f"content-length: {length}",
        ]
        if proof:
            lines.append(f"{PROOF_HEADER}: {proof}")
        if self._closes_connection:
            lines.append("connection: close")
        return "\r\n".join((*lines, "", "")).encode()


def inventory_to_json(snapshot_store: SnapshotStore) -> dict[str, Any]:
    """The sealed manifests of every snapshot, and the plans that say who the writers are."""
    held = snapshot_store.inventory()
    plans: dict[str, Any] = {}
    for generation in {line.generation for line in held}:
        try:
            topology, table = snapshot_store.topology_and_table(generation)
        except KeyError:
            continue
        plans[str(generation)] = {
            "topology": topology.to_json(),
            "table": [spec.to_json() for spec in table],
        }
    return {"snapshots": [line.sealed_manifest.decode() for line in held], "plans": plans}


def _send_file(connection: socket.socket, fd: int, offset: int, count: int) -> None:
    """Send a piece of a file; the socket has a time-out, so it does not block by itself.

    Raises OSError when the other end has closed or takes nothing for STALL_SECONDS.
    """
    poll = select.poll()
    poll.register(connection, select.POLLOUT)
    end = offset + count
    while offset < end:
        try:
            sent = os.sendfile(connection.fileno(), fd, offset, end - offset)
        except BlockingIOError:
            if not poll.poll(STALLED_RECEIVER_TIMEOUT_S * 1000):
                raise TimeoutError("the receiver takes nothing") from None
            continue
        if not sent:
            raise ConnectionError("the memory file is shorter than its slots")
        offset += sent


def _send_encrypted(connection: socket.socket, fd: int, offset: int, count: int) -> None:
    """As `_send_file` over TLS, which sendfile(2) does not encrypt. Raises OSError."""
    buffer, end = memoryview(bytearray(min(count, ENCRYPTED_PIECE_BYTES))), offset + count
    connection.settimeout(STALLED_RECEIVER_TIMEOUT_S)
    while offset < end:
        read = os.preadv(fd, [buffer[: end - offset]], offset)
        if not read:
            raise ConnectionError("the memory file is shorter than its slots")
        connection.sendall(buffer[:read])
        offset += read
    connection.settimeout(IDLE_CONNECTION_TIMEOUT_S)
