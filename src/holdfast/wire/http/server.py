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

from holdfast.core.json_parsing import parsed
from holdfast.errors import FencedError
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
from holdfast.wire.http.client import OUTSIDE
from holdfast.wire.http.connection import Answer, Application, Connection, Head, Reader
from holdfast.wire.http.connection_limits import QUEUE, Doors
from holdfast.wire.http.refusals import CONTROL, Reason, Refusals
from holdfast.wire.secret import Secret

Handler = Callable[[int, dict[str, Any]], Awaitable[dict[str, Any]]]
"""(generation of the request, body) -> answer. Raises ValueError or KeyError for a body that makes
no sense, FencedError when a newer generation opened meanwhile."""

MAX_BODY = 8 << 20
"""Bytes of a request's body at most: control is small, bulk bytes travel elsewhere."""

END_SECONDS = 1.0
"""What is being answered when a listener is closed has so long."""


class Guard:
    """The application that serves `handlers` to holders of the secret.

    `newest()` names the current generation; requests of older ones are answered 409. The paths in
    `outside` may also be asked from outside any generation.
    """

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        secret: Secret,
        verifier: Verifier,
        newest: Callable[[], int],
        *,
        outside: frozenset[str] = frozenset(),
        max_body: int = MAX_BODY,
        refusals: Refusals | None = None,
    ) -> None:
        self.paths = tuple(handlers)
        """Everything that can be asked here."""
        self.outside = outside
        self._secret = secret
        self._verifier = verifier
        self._newest = newest
        self._max_body = max_body
        self._refusals = refusals or Refusals()
        self._handlers = {path.encode(): (path, handler) for path, handler in handlers.items()}
        self.doors = Doors(CONTROL, self._refusals)

    def admit(self, head: Head) -> Answer | Reader:
        found = self._handlers.get(head.target)
        if found is None:  # or another way to write one of ours
            return self._stranger(404, "no such path")
        if head.method != b"POST":
            return self._stranger(405, "no such path")
        path, handler = found
        try:
            length, digest = _stated(head)
            proof = _proof(head)
            self._verifier.check("POST", path, stated(length, digest), proof)
        except MisdirectedError as error:
            if error.fault != "first contact":
                self._refusals.count(CONTROL, error.fault)
            return self._signed(proof, MISDIRECTED, self._verifier.told())
        except AuthError as error:
            return self._stranger(401, error.fault)
        except ValueError:
            return self._stranger(411, "malformed")
        if length > self._max_body:
            self._refusals.count(CONTROL, "too long")
            words = f"the request is too long: {length} bytes, and {self._max_body} are allowed"
            return self._signed(proof, 413, {"error": words}, close=True)

        async def read(body: bytes) -> Answer:
            if len(body) != length or (body and sha256(body) != digest):
                return self._stranger(401, "wrong proof")
            status, value = await self._answer(path, handler, proof.generation, body)
            return self._signed(proof, status, value)

        return read

    def _stranger(self, status: int, reason: Reason) -> Answer:
        """Refused, unsigned, and not spoken with any longer."""
        self._refusals.count(CONTROL, reason)
        return Answer(status, close=True)

    def _signed(
        self, proof: Proof, status: int, value: dict[str, Any], close: bool = False
    ) -> Answer:
        content = json.dumps(value, separators=(",", ":")).encode()
        digest = sign_answer(self._secret, proof.nonce, status, content)
        lines = f"holdfast-hmac: {digest}\r\ncontent-type: application/json\r\n"
        return Answer(status, content, lines.encode(), close)

    async def _answer(
        self, path: str, handler: Handler, generation: int, body: bytes
    ) -> tuple[int, dict[str, Any]]:
        newest = self._newest()
        outside = generation == OUTSIDE and path in self.outside
        if generation < max(newest, OUTSIDE + 1) and not outside:
            self._refusals.count(CONTROL, "older generation")
            return 409, {"error": f"generation {generation} is over: {newest} rules"}
        if generation > newest and not outside:
            self._refusals.count(CONTROL, "unknown generation")
            return 400, {"error": f"generation {generation} has not been opened: {newest} rules"}
        try:
            value = parsed(body)
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


def _stated(head: Head) -> tuple[int, str]:
    """What the head says of the body: how many bytes, and their SHA-256.

    Raises ValueError for a body whose length is not said beforehand.
    """
    if "transfer-encoding" in head.headers:
        raise ValueError("the request does not say how long it is")
    return int(head.headers.get("content-length", "0")), head.headers.get(BODY, "")


def _proof(head: Head) -> Proof:
    """Raises AuthError, also where one of its headers comes twice."""
    if any(name.startswith("holdfast-") for name in head.twice):
        raise AuthError("a header of the proof comes twice", "no proof")
    return Proof.from_headers(head.headers)


class Listener:
    """Serves an application on a socket that is already bound, inside the caller's event loop."""

    def __init__(self, application: Application, bound: socket.socket) -> None:
        self._application, self._socket = application, bound
        self._connections: set[Connection] = set()
        self._closing = asyncio.Event()

    async def serve(self) -> None:
        """Answer until `close`; cancelled, it leaves nothing behind either."""
        server = await asyncio.get_running_loop().create_server(
            lambda: Connection(self._application, self._connections),
            sock=self._socket, backlog=self._application.doors.batch,
        )  # fmt: skip
        # asyncio accepts as many at a time as the queue is long: it is made longer afterwards.
        self._socket.listen(QUEUE)
        try:
            await self._closing.wait()
            server.close()
            await self._let_end()
        finally:
            server.close()
            for connection in tuple(self._connections):
                connection.drop()

    def close(self) -> None:
        self._closing.set()

    async def _let_end(self) -> None:
        for connection in tuple(self._connections):
            connection.end()
        working = [task for one in self._connections if (task := one.working) is not None]
        if working:
            await asyncio.wait(working, timeout=END_SECONDS)
        await asyncio.sleep(0)  # what was written last leaves
