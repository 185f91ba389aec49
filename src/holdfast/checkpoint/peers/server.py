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

from holdfast.checkpoint.memory.snapshot_store import Shelf, Snapshot
from holdfast.checkpoint.peers.client import (
    COPY,
    FAILED,
    FENCED,
    INVENTORY,
    MISSING,
    NEWEST,
    OFFER,
    OK,
    PROOF,
    RANGE,
    REFUSED,
    TOO_LONG,
    UNKNOWN,
)
from holdfast.checkpoint.peers.rate_limiter import Budget
from holdfast.core.format.manifest import blob_key, parse_save_key, writer_name
from holdfast.core.json_parsing import parsed
from holdfast.errors import FencedError, HoldfastError
from holdfast.wire.http.auth import (
    BODY,
    MISDIRECTED,
    AuthError,
    MisdirectedError,
    Proof,
    Verifier,
    sha256,
    sign_answer,
    stated,
)
from holdfast.wire.http.refusals import PEERS, Reason, Refusals
from holdfast.wire.http.sync_connection import BrokenError, Incoming, Request, parse_request
from holdfast.wire.secret import Secret
from holdfast.wire.store.run_store import MissingKeyError

CONNECTIONS = 64
PROOF_SECONDS = 10.0
"""A connection that has proven nothing for so long is cut."""
IDLE_SECONDS = 60.0
STALL_SECONDS = 20.0
"""A receiver that takes nothing for so long is given up."""
BODY_LIMIT = 64 << 20
"""Bytes of an offer at most: the manifest of a part, and the state table."""
LENGTH = "content-length"
PIECE = 1 << 20
"""Bytes that leave at a time: the grain of the budget."""


class Receiver(Protocol):
    """The object that answers offers: `receiver.Keeper`."""

    @property
    def idle(self) -> bool:
        """True if nothing is kept, nor about to be."""
        ...

    def offer(self, generation: int, body: dict[str, Any]) -> dict[str, Any]: ...


class PeerServer(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Serves one shelf on a socket that is bound already."""

    daemon_threads = True
    block_on_close = False

    def __init__(
        self,
        bound: socket.socket,
        secret: Secret,
        shelf: Shelf,
        receiver: Receiver,
        budget: Budget,
        run: str | None,
        *,
        clock: Callable[[], float] = time.time,
        connections: int = CONNECTIONS,
        patience: float = PROOF_SECONDS,
        settled: Callable[[], object] = lambda: None,
        refusals: Refusals | None = None,
    ) -> None:
        """`run`: whose snapshots lie here (`identity`); None: of whichever run speaks first, until
        nothing of it is kept any more. `settled` waits, for a moment, for what is being hashed: it
        belongs into the inventory."""
        super().__init__(bound.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()  # the one that the base class made
        bound.setblocking(True)
        self.socket = bound
        self.secret, self.shelf, self.receiver, self.budget = secret, shelf, receiver, budget
        self.verifier = Verifier(secret, clock)
        self.settled = settled
        self.refusals = refusals or Refusals()
        self.verbs: dict[str, Callable[[int, dict[str, Any]], dict[str, Any]]] = {}
        """More that is answered, by path: given the generation of who asks, and a JSON object."""
        self.sent = 0  # bytes of ranges, for the status
        self._most, self._patience = connections, patience
        self._open: dict[socket.socket, bool] = {}  # oldest first; whether it has proven itself
        self._since: dict[socket.socket, float] = {}  # when it came
        self._idle: dict[socket.socket, None] = {}  # proven, and nothing asked; the longest first
        self._lock = threading.Lock()
        self._newest = 0
        self._run, self._bound = run, run is not None

    def start(self) -> None:
        threading.Thread(target=self.serve_forever, args=(0.5,), name="peers", daemon=True).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def admit(self, run: str, generation: int) -> None:
        """Raises FencedError for a generation older than the newest one seen, and ValueError for
        another run's."""
        with self._lock:
            if run != self._run:
                if self._bound or not self.receiver.idle:
                    raise ValueError("the snapshots of another run are kept here")
                self._run, self._newest = run, 0
            if generation < self._newest:
                raise FencedError(f"generation {generation} is over: {self._newest} rules")
            self._newest = generation

    def advance(self, generation: int) -> None:
        """This mover's own agent has opened a generation."""
        with self._lock:
            self._newest = max(self._newest, generation)

    @property
    def newest(self) -> int:
        with self._lock:
            return self._newest

    def newest_of(self, run: str) -> int:
        """The newest generation of a run that ever asked here; 0 for a run that is not known."""
        with self._lock:
            return self._newest if run == self._run else 0

    # --- connections ------------------------------------------------------------------------
    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open[request], self._since[request] = False, time.monotonic()
            strangers = [one for one in self._strangers() if one is not request]
            crowd = [*strangers, *self._idle, request, *self._open]
            while len(self._open) > self._most:
                if crowd[0] not in self._idle:  # of ours, who comes again when it is needed
                    self.refusals.count(PEERS, "crowded")
                self._cut(crowd.pop(0))
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Close connections that proved nothing in time; called between two connections, and twice
        a second."""
        late = time.monotonic() - self._patience
        with self._lock:
            for connection in self._strangers():
                if self._since[connection] < late:
                    self.refusals.count(PEERS, "slow")
                    self._cut(connection)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
            self._since.pop(request, None)
            self._idle.pop(request, None)
        super().shutdown_request(request)

    def _strangers(self) -> list[socket.socket]:
        return [connection for connection, proven in self._open.items() if not proven]

    def proven(self, connection: socket.socket) -> None:
        with self._lock:
            if connection in self._open:
                self._open[connection] = True
                self._idle.pop(connection, None)

    def served(self, connection: socket.socket) -> None:
        """Nothing is under way over a connection that has proven itself."""
        with self._lock:
            if self._open.get(connection):
                self._idle[connection] = None

    def _cut(self, connection: socket.socket) -> None:
        if self._open.pop(connection, None) is not None:
            self._since.pop(connection, None)
            self._idle.pop(connection, None)
            try:
                connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads from it
            except OSError:
                return

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A broken connection is no news."""


class _Handler(socketserver.BaseRequestHandler):
    """One connection."""

    server: PeerServer
    request: socket.socket
    _asked: Request

    def handle(self) -> None:
        self.request.settimeout(IDLE_SECONDS)
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._incoming, self._over = Incoming(self.request), False
        while not self._over:
            try:
                head = self._incoming.head()
                if not head:
                    return
                self._asked = parse_request(head)
            except (BrokenError, ValueError):  # this sender learns no more than any other
                self._refuse(REFUSED, "not ours")
                return
            self._over = not self._asked.keep
            match self._asked.method:
                case "GET":
                    self._get()
                case "POST":
                    self._post()
                case _:
                    self._refuse(HTTPStatus.NOT_IMPLEMENTED, "not ours")
            self.server.served(self.request)

    def _get(self) -> None:
        if self._length() != 0:
            self._refuse(REFUSED, "malformed")
            return
        proof = self._proof(b"")
        if proof is not None:
            self._serve(proof, b"")

    def _post(self) -> None:
        length, digest = self._length(), self._asked.headers.get(BODY, "")
        if length is None or length > BODY_LIMIT:
            self._refuse(TOO_LONG, "malformed" if length is None else "too long")
            return
        proof = self._proof(stated(length, digest))
        if proof is None:
            return
        body = self._incoming.read(length)
        if body and sha256(body) != digest:
            self._refuse(UNKNOWN, "wrong proof")
            return
        self._serve(proof, body)

    def _length(self) -> int | None:
        """Bytes of the body; None where that is not said, or not in one way."""
        headers = self._asked.headers
        if "transfer-encoding" in headers or LENGTH in self._asked.twice:
            return None
        length = headers.get(LENGTH, "" if self._asked.method == "POST" else "0")
        return int(length) if length.isdecimal() and len(length) < 16 else None

    def _proof(self, covered: bytes) -> Proof | None:
        """Return the checked proof of the head. Without a valid one, answer the request and return
        None."""
        asked = self._asked
        try:
            if any(name.startswith("holdfast-") for name in asked.twice):
                raise AuthError("a header of the proof comes twice", "no proof")
            proof = Proof.from_headers(asked.headers)
            self.server.verifier.check(asked.method, asked.target, covered, proof)
        except MisdirectedError as error:
            if error.fault != "first contact":
                self.server.refusals.count(PEERS, error.fault)
            self._misdirected(proof, len(covered) > 0)
            return None
        except AuthError as error:
            self._refuse(UNKNOWN, error.fault)
            return None
        self.server.proven(self.request)
        return proof

    def _misdirected(self, proof: Proof, close: bool) -> None:
        """`close`: a body follows, which is not read."""
        self._over = self._over or close
        self._signed(proof, MISDIRECTED, self.server.verifier.told())

    def _refuse(self, status: int, reason: Reason) -> None:
        self.server.refusals.count(PEERS, reason)
        self._over = True
        self.request.sendall(self._head(status, 0, ""))

    def _serve(self, proof: Proof, body: bytes) -> None:
        value: dict[str, Any]
        try:
            parts = urlsplit(self._asked.target)
            asked = {key: found[-1] for key, found in parse_qs(parts.query).items()}
            if parts.path != NEWEST:
                self.server.admit(asked.get("run", ""), proof.generation)
            if (self._asked.method, parts.path) == ("GET", RANGE):
                self._range(proof.nonce, asked)
                return
            if (self._asked.method, parts.path) == ("GET", NEWEST):
                status, value = OK, {"generation": self.server.newest_of(asked.get("run", ""))}
            else:
                status, value = OK, self._value(parts.path, proof.generation, body)
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
        self._signed(proof, status, value)

    def _signed(self, proof: Proof, status: int, value: dict[str, Any]) -> None:
        content = json.dumps(value, separators=(",", ":")).encode()
        digest = sign_answer(self.server.secret, proof.nonce, status, content)
        self.request.sendall(self._head(status, len(content), digest) + content)

    def _value(self, path: str, generation: int, body: bytes) -> dict[str, Any]:
        if (self._asked.method, path) == ("GET", INVENTORY):
            self.server.settled()
            return inventory(self.server.shelf)
        verb = self.server.receiver.offer if path == OFFER else self.server.verbs.get(path)
        if self._asked.method == "POST" and verb is not None:
            value = parsed(body)
            if not isinstance(value, dict):
                raise ValueError("the body is not a JSON object")
            return verb(generation, value)
        raise MissingKeyError(f"there is nothing to ask at {self._asked.target[:80]!r}")

    # --- bytes ------------------------------------------------------------------------------
    def _range(self, nonce: str, asked: dict[str, str]) -> None:
        """Answer with bytes of a slot; what goes wrong before the first of them is raised."""
        start, stop = int(asked["start"]), int(asked["stop"])
        found = self.server.shelf.get(*name_of(asked["key"]))
        if not 0 <= start < stop <= found.header.length:
            raise ValueError(f"bytes [{start}, {stop}) of {found.header.length}")
        proof = sign_answer(self.server.secret, nonce, OK, self._asked.target.encode())
        self.request.sendall(self._head(OK, stop - start, proof, "application/octet-stream"))
        if not self._send_slot(found, start, stop, paid=asked.get("use") == COPY):
            self._over = True
            self.request.shutdown(socket.SHUT_RDWR)

    def _send_slot(self, found: Snapshot, start: int, stop: int, paid: bool) -> bool:
        """Send a slot's range; return True if it held the snapshot until the last piece was
        sent."""
        at = found.memory.arena.data_offset(found.slot)
        while start < stop:
            piece = min(PIECE, stop - start)
            if paid:
                self.server.budget.take(piece)
            if not found.whole:
                return False
            _send_file(self.request, found.memory.fd, at + start, piece)
            self.server.sent += piece
            start += piece
        return found.whole

    def _head(self, status: int, length: int, proof: str, kind: str = "application/json") -> bytes:
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", f"content-type: {kind}",
                 f"content-length: {length}"]  # fmt: skip
        if proof:
            lines.append(f"{PROOF}: {proof}")
        if self._over:
            lines.append("connection: close")
        return "\r\n".join((*lines, "", "")).encode()


def inventory(shelf: Shelf) -> dict[str, Any]:
    """The sealed manifests of every snapshot, and the plans that say who the writers are."""
    held = shelf.inventory()
    plans: dict[str, Any] = {}
    for generation in {line.generation for line in held}:
        try:
            topology, table = shelf.plan(generation)
        except KeyError:
            continue
        plans[str(generation)] = {
            "topology": topology.to_json(), "table": [spec.to_json() for spec in table],
        }  # fmt: skip
    return {"snapshots": [line.stored.decode() for line in held], "plans": plans}


def name_of(key: str) -> tuple[int, int, int]:
    """(generation, step, rank) of a blob's key. Raises ValueError for any other."""
    position = parse_save_key(key)
    rank = key.rpartition("-rank")[2].partition("-")[0]
    if position is None or not rank.isdecimal():
        raise ValueError(f"{key!r} is not the key of a blob")
    step, generation = position
    if blob_key(generation, step, writer_name(int(rank))) != key:
        raise ValueError(f"{key!r} is not the key of a blob")
    return generation, step, int(rank)


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
            if not poll.poll(STALL_SECONDS * 1000):
                raise TimeoutError("the receiver takes nothing") from None
            continue
        if not sent:
            raise ConnectionError("the memory file is shorter than its slots")
        offset += sent
