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
from typing import Any

from holdfast.core.json_parsing import parse_json
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


class SignedApplication:
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
        self.paths = tuple(handlers)
        """Everything that can be asked here."""
        self.generationless_paths = generationless_paths
        self._secret = secret
        self._verifier = verifier
        self._newest_generation = newest_generation
        self._max_body_bytes = max_body_bytes
        self._refusals = refusals or Refusals()
        self._handlers = {path.encode(): (path, handler) for path, handler in handlers.items()}
        self.limiter = ConnectionLimiter(CONTROL, self._refusals)
        self.tls = listener_context(secret)

    def admit(self, head: RequestHead) -> HttpResponse | BodyHandler:
        found = self._handlers.get(head.target)
        if found is None:  # or another way to write one of ours
            return self._refuse_unsigned(404, "no such path")
        if head.method != b"POST":
            return self._refuse_unsigned(405, "no such path")
        path, handler = found
        try:
            length, digest = _body_claim(head)
            proof = Proof.from_headers(head.headers, head.repeated)
            self._verifier.check("POST", path, body_statement(length, digest), proof)
        except MisdirectedError as error:
            if error.fault != "first contact":
                self._refusals.count(CONTROL, error.fault)
            return self._sign_response(
                proof, MISDIRECTED_STATUS, self._verifier.misdirected_answer()
            )
        except AuthError as error:
            return self._refuse_unsigned(401, error.fault)
        except ValueError:
            return self._refuse_unsigned(411, "malformed")
        if length > self._max_body_bytes:
            self._refusals.count(CONTROL, "too long")
            words = (
                f"the request is too long: {length} bytes, and {self._max_body_bytes} are allowed"
            )
            return self._sign_response(proof, 413, {"error": words}, close=True)

        async def read(body: bytes) -> HttpResponse:
            if len(body) != length or (body and sha256_hex(body) != digest):
                return self._refuse_unsigned(401, "wrong proof")
            status, value = await self._answer(path, handler, proof.generation, body)
            return self._sign_response(proof, status, value)

        return read

    def _refuse_unsigned(self, status: int, reason: RefusalReason) -> HttpResponse:
        """Refused, unsigned, and not spoken with any longer."""
        self._refusals.count(CONTROL, reason)
        return HttpResponse(status, close=True)

    def _sign_response(
        self, proof: Proof, status: int, value: dict[str, Any], close: bool = False
    ) -> HttpResponse:
        content = json.dumps(value, separators=(",", ":")).encode()
        digest = sign_answer(self._secret, proof.nonce, status, content)
        lines = f"holdfast-hmac: {digest}\r\ncontent-type: application/json\r\n"
        return HttpResponse(status, content, lines.encode(), close)

    async def _answer(
        self, path: str, handler: Handler, generation: int, body: bytes
    ) -> tuple[int, dict[str, Any]]:
        newest = self._newest_generation()
        outside = generation == NO_GENERATION and path in self.generationless_paths
        if generation < max(newest, NO_GENERATION + 1) and not outside:
            self._refusals.count(CONTROL, "older generation")
            return 409, {"error": f"generation {generation} is over: {newest} rules"}
        if generation > newest and not outside:
            self._refusals.count(CONTROL, "unknown generation")
            return 400, {"error": f"generation {generation} has not been opened: {newest} rules"}
        try:
            value = parse_json(body)
            if not isinstance(value, dict):
                self._refusals.count(CONTROL, "malformed")
                return 400, {"error": "the body is not a JSON object"}
            return 200, await handler(generation, value)
        except FencedError as error:
            return 409, {"error": str(error)}
        except (ValueError, KeyError, TypeError) as error:
            self._refusals.count(CONTROL, "malformed")
            name = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            return 400, {"error": f"{name}{error}"}
        except Exception as error:  # our own bug: the worker that asked says it aloud
            return 500, {"error": f"{type(error).__name__}: {error}"}


def _body_claim(head: RequestHead) -> tuple[int, str]:
    """What the head says of the body: how many bytes, and their SHA-256.

    Raises ValueError for a body whose length is not said beforehand.
    """
    if "transfer-encoding" in head.headers:
        raise ValueError("the request does not say how long it is")
    return int(head.headers.get("content-length", "0")), head.headers.get(BODY_HEADER, "")


class HttpListener:
    """Serves an application on a socket that is already bound, inside the caller's event loop."""

    def __init__(self, application: Application, bound: socket.socket) -> None:
        self._application, self._socket = application, bound
        self._connections: set[HttpConnection] = set()
        self._closing = asyncio.Event()

    async def serve(self) -> None:
        """Answer until `close`; cancelled, it leaves nothing behind either."""
        server = await asyncio.get_running_loop().create_server(
            self._make_connection,
            sock=self._socket,
            backlog=self._application.limiter.accept_batch,
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
