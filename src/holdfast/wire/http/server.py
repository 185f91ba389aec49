"""The answering side of `client`: a table of handlers behind one guard.

The guard stands before every handler. It checks the proof in the head, bounds the body and compares
it with what was proven. It refuses older generations, and signs the answer. A handler sees only
requests of this run's own processes. Refusals are counted (`refusals`), and connections that prove
nothing are closed in time (`connection_limits`).
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from holdfast.core.json_parsing import JsonObject, parse_json
from holdfast.errors import FencedError
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
from holdfast.wire.http.client import NO_GENERATION
from holdfast.wire.http.connection import (
    Application,
    BodyHandler,
    HttpConnection,
    HttpResponse,
    RequestHead,
)
from holdfast.wire.http.connection_limits import LISTEN_BACKLOG, ConnectionLimiter
from holdfast.wire.http.refusals import CONTROL, RefusalReason, Refusals
from holdfast.wire.http.tls import listener_context
from holdfast.wire.http.tls_connection import TlsConnection
from holdfast.wire.secret import Secret

Handler = Callable[[int, dict[str, Any]], Awaitable[dict[str, Any]]]
"""(generation of the request, body) -> answer. Raises ValueError or KeyError for a body that makes
no sense, FencedError when a newer generation opened meanwhile."""

MAX_BODY_BYTES = 8 << 20
"""Bytes of a request's body at most: control is small, bulk bytes travel elsewhere."""

CLOSE_TIMEOUT_S = 1.0
"""What is being answered when a listener is closed has so long."""


class RequestGuard:
    """Checks the proofs of requests to one listener, and signs its answers."""

    def __init__(self, secret: Secret, verifier: Verifier, limiter: ConnectionLimiter) -> None:
        self._secret, self._verifier = secret, verifier
        self.limiter = limiter
        self.tls = listener_context(secret)

    def count(self, reason: RefusalReason, request: str = "") -> None:
        """Count a request that is refused. request: as of `Refusals.count`."""
        self.limiter.refusals.count(self.limiter.listener, reason, request)

    def refuse(self, status: int, reason: RefusalReason, request: str = "") -> HttpResponse:
        """Refuse a request, unsigned, and close its connection."""
        self.count(reason, request)
        return HttpResponse(status, close=True)

    def sign(
        self, proof: Proof, status: int, value: JsonObject, close: bool = False
    ) -> HttpResponse:
        """Return a signed answer."""
        content = json.dumps(value, separators=(",", ":")).encode()
        headers = self.signed_headers(proof, status, content, "application/json")
        return HttpResponse(status, content, headers, close)

    def signed_headers(self, proof: Proof, status: int, content: bytes, kind: str) -> bytes:
        digest = sign_answer(self._secret, proof.nonce, status, content)
        return f"holdfast-hmac: {digest}\r\ncontent-type: {kind}\r\n".encode()

    def prove(
        self, head: RequestHead, target: str, request: str = ""
    ) -> tuple[Proof, BodyClaim] | HttpResponse:
        """Check the proof in a head; return it, and what the head says of the body. Without a valid
        one, return the answer. Raises ValueError for a body of unknown length."""
        claim = BodyClaim.of(head)
        try:
            proof = Proof.from_headers(head.headers, head.repeated)
            covered = body_statement(*claim)
            self._verifier.check(head.method.decode(), target, covered, proof)
        except MisdirectedError as error:
            if error.fault != "first contact":
                self.count(error.fault, request)
            return self.sign(proof, MISDIRECTED_STATUS, self._verifier.misdirected_answer())
        except AuthError as error:
            return self.refuse(401, error.fault, request)
        return proof, claim


class BodyClaim(NamedTuple):
    """What a head says of the body."""

    length: int
    digest: str  # SHA-256, in hexadecimal digits; "" without a body

    @staticmethod
    def of(head: RequestHead) -> BodyClaim:
        """Raises ValueError for a body whose length is not said beforehand, or not in one way."""
        length = head.headers.get("content-length", "0")
        is_plain = length.isdecimal() and len(length) < 16 and "content-length" not in head.repeated
        if not is_plain or "transfer-encoding" in head.headers:
            raise ValueError("the request does not say how long it is")
        return BodyClaim(int(length), head.headers.get(BODY_HEADER, ""))

    def matches(self, body: bytes) -> bool:
        """Return True if the body is what the head says."""
        return len(body) == self.length and (not body or sha256_hex(body) == self.digest)


class SignedApplication(RequestGuard):
    """The application that serves `handlers` to holders of the secret.

    `newest()` names the current generation; requests of older ones are answered 409. The paths in
    `generationless_paths` may also be asked from outside any generation.
    """

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        secret: Secret,
        verifier: Verifier,
        newest_generation: Callable[[], int],
        *,
        generationless_paths: frozenset[str] = frozenset(),
        max_body_bytes: int = MAX_BODY_BYTES,
        refusals: Refusals | None = None,
    ) -> None:
        super().__init__(secret, verifier, ConnectionLimiter(CONTROL, refusals))
        self.paths = tuple(handlers)
        """Everything that can be asked here."""
        self.generationless_paths = generationless_paths
        self._newest_generation = newest_generation
        self._max_body_bytes = max_body_bytes
        self._handlers = {path.encode(): (path, handler) for path, handler in handlers.items()}

    def admit(self, head: RequestHead) -> HttpResponse | BodyHandler:
        found = self._handlers.get(head.target)
        if found is None:  # or another way to write one of ours
            return self.refuse(404, "no such path")
        if head.method != b"POST":
            return self.refuse(405, "no such path")
        path, handler = found
        request = f"POST {path}"
        try:
            proven = self.prove(head, path, request)
        except ValueError:
            return self.refuse(411, "malformed", request)
        if isinstance(proven, HttpResponse):
            return proven
        proof, claim = proven
        if claim.length > self._max_body_bytes:
            self.count("too long", request)
            limit = f"{claim.length} bytes, and {self._max_body_bytes} are allowed"
            return self.sign(proof, 413, {"error": f"the request is too long: {limit}"}, close=True)

        async def read(body: bytes) -> HttpResponse:
            if not claim.matches(body):
                return self.refuse(401, "wrong proof", request)
            status, value = await self._answer(path, handler, proof.generation, body)
            return self.sign(proof, status, value)

        return read

    async def _answer(
        self, path: str, handler: Handler, generation: int, body: bytes
    ) -> tuple[int, dict[str, Any]]:
        newest = self._newest_generation()
        outside = generation == NO_GENERATION and path in self.generationless_paths
        if generation < max(newest, NO_GENERATION + 1) and not outside:
            self.count("older generation")
            return 409, {"error": f"generation {generation} is over: {newest} rules"}
        if generation > newest and not outside:
            self.count("unknown generation")
            return 400, {"error": f"generation {generation} has not been opened: {newest} rules"}
        try:
            value = parse_json(body)
            if not isinstance(value, dict):
                self.count("malformed", f"POST {path}")
                return 400, {"error": "the body is not a JSON object"}
            return 200, await handler(generation, value)
        except FencedError as error:
            return 409, {"error": str(error)}
        except (ValueError, KeyError, TypeError) as error:
            self.count("malformed", f"POST {path}")
            name = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            return 400, {"error": f"{name}{error}"}
        except Exception as error:  # our own bug: the worker that asked says it aloud
            return 500, {"error": f"{type(error).__name__}: {error}"}


class HttpListener:
    """Serves an application on a socket that is already bound, inside the caller's event loop."""

    def __init__(self, application: Application, bound: socket.socket) -> None:
        self._application, self._socket = application, bound
        self._connections: set[HttpConnection] = set()
        self._closing = asyncio.Event()

    async def serve(self) -> None:
        """Answer until `close`; cancelled, it leaves nothing behind either."""
        server = await asyncio.get_running_loop().create_server(
            self._make_connection, sock=self._socket, backlog=self._application.limiter.accept_batch
        )
        # asyncio accepts as many at a time as the queue is long: it is made longer afterwards.
        self._socket.listen(LISTEN_BACKLOG)
        try:
            await self._closing.wait()
            server.close()
            await self._finish_connections()
        finally:
            server.close()
            for connection in tuple(self._connections):
                connection.abort_and_cancel()

    def close(self) -> None:
        self._closing.set()

    def abort(self) -> None:
        """Cut every connection, and end `serve`."""
        for connection in tuple(self._connections):
            connection.abort_and_cancel()
        self._closing.set()

    def _make_connection(self) -> asyncio.Protocol:
        connection = HttpConnection(self._application, self._connections)
        tls = self._application.tls
        return connection if tls is None else TlsConnection(connection, tls)

    async def _finish_connections(self) -> None:
        for connection in tuple(self._connections):
            connection.close_gracefully()
        working = [task for one in self._connections if (task := one.task) is not None]
        if working:
            await asyncio.wait(working, timeout=CLOSE_TIMEOUT_S)
        await asyncio.sleep(0)  # what was written last leaves
