"""The answering side of `client`: a table of handlers behind one guard.

The guard stands before every handler: it bounds the body, checks the proof, refuses older
generations, and signs the answer. A handler sees only requests of this run's own processes.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from holdfast.errors import FencedError, RunFolderError
from holdfast.spec.parsing import parsed
from holdfast.wire.auth import AuthError, Proof, Verifier, sign_answer
from holdfast.wire.client import OUTSIDE
from holdfast.wire.secret import Secret

Handler = Callable[[int, dict[str, Any]], Awaitable[dict[str, Any]]]
"""(generation of the request, body) -> answer. Raises ValueError or KeyError for a body that makes
no sense, FencedError when a newer generation opened meanwhile."""

MAX_BODY = 8 << 20
"""Bytes of a request's body at most: control is small, bulk bytes travel elsewhere."""


class Guard:
    """Builds the application that serves `handlers` to those who know the secret.

    `newest()` names the generation that rules; requests of older ones are answered 409. The paths
    in `outside` may also be asked from outside any generation.
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
    ) -> None:
        self._secret = secret
        self._verifier = verifier
        self._newest = newest
        self._outside = outside
        self._max_body = max_body
        self.application = Starlette(
            routes=[
                Route(path, self._endpoint(path, handler), methods=["POST"])
                for path, handler in handlers.items()
            ]
        )

    def _endpoint(self, path: str, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            try:
                body = await self._read(request)
            except ClientDisconnect:
                return Response(status_code=400)
            if body is None:
                return Response(status_code=413)
            try:
                proof = Proof.from_headers(request.headers)
                self._verifier.check("POST", path, body, proof)
            except AuthError:
                return Response(status_code=401)
            status, value = await self._answer(path, handler, proof.generation, body)
            content = json.dumps(value, separators=(",", ":")).encode()
            digest = sign_answer(self._secret, proof.nonce, status, content)
            return Response(content, status, {"holdfast-hmac": digest}, "application/json")

        return endpoint

    async def _read(self, request: Request) -> bytes | None:
        """The body, or None when it is longer than what is allowed."""
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > self._max_body:
                return None
        return bytes(body)

    async def _answer(
        self, path: str, handler: Handler, generation: int, body: bytes
    ) -> tuple[int, dict[str, Any]]:
        newest = self._newest()
        outside = generation == OUTSIDE and path in self._outside
        if generation < newest and not outside:
            return 409, {"error": f"generation {generation} is over: {newest} rules"}
        if generation > newest:
            return 400, {"error": f"generation {generation} has not been opened: {newest} rules"}
        try:
            value = parsed(body)
            if not isinstance(value, dict):
                return 400, {"error": "the body is not a JSON object"}
            return 200, await handler(generation, value)
        except FencedError as error:
            return 409, {"error": str(error)}
        except (ValueError, KeyError, TypeError) as error:
            return 400, {"error": f"{type(error).__name__}: {error}"}
        except Exception as error:  # our own bug: the worker that asked says it aloud
            return 500, {"error": f"{type(error).__name__}: {error}"}


class Listener:
    """One uvicorn server on a socket that is already bound, inside the caller's event loop."""

    def __init__(self, application: Any, bound: socket.socket) -> None:
        self._socket = bound
        self._server = _Server(
            uvicorn.Config(
                application,
                log_config=None,
                log_level="critical",  # garbage on the port is no news
                access_log=False,
                lifespan="off",
                loop="asyncio",
                http="h11",
                ws="none",
                timeout_keep_alive=3600,
                timeout_graceful_shutdown=1,
                server_header=False,
                date_header=False,
            )
        )

    async def serve(self) -> None:
        """Answer until `close`."""
        await self._server.serve(sockets=[self._socket])

    def close(self) -> None:
        self._server.should_exit = True


class _Server(uvicorn.Server):
    """Leaves signals to the agent: uvicorn would take Ctrl-C for itself."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int, key: str) -> socket.socket:
    """A listening socket on exactly this interface; port 0 takes any free one.

    `key` is the run file's key that named them, for the message. Raises RunFolderError.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen(128)
        bound.setblocking(False)
    except OSError as error:
        bound.close()
        raise AddressError(
            f"cannot listen on {host}:{port} ({error.strerror or error})",
            where=key,
            remedy="use an address of this machine and a free port (0 takes any)",
        ) from None
    return bound


class AddressError(RunFolderError):
    """An address of the run file cannot be listened on."""


def address_of(bound: socket.socket) -> str:
    """ "host:port", the host in brackets for IPv6."""
    name: Sequence[Any] = bound.getsockname()
    return f"[{name[0]}]:{name[1]}" if bound.family == socket.AF_INET6 else f"{name[0]}:{name[1]}"
