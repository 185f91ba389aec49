"""`client`, for an event loop: signed JSON requests on connections that stay open.

An agent holds a request open at its coordinator while it lives. A benchmark holds thousands in
one process. Neither wants a thread for each. What is signed, and what an answer proves, is the same
as there.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from typing import Any

import httptools

from holdfast.core.json_parsing import parse_json
from holdfast.wire.http.auth import (
    MISDIRECTED_STATUS,
    AuthError,
    ListenerIdentity,
    Proof,
    check_answer,
    request_headers,
)
from holdfast.wire.http.client import (
    MAX_ANSWER_BYTES,
    NO_GENERATION,
    UnreachableError,
    verify_answer,
)
from holdfast.wire.http.tls import explain
from holdfast.wire.secret import Secret


class AgentEndedError(UnreachableError):
    """The machine answers that no process listens at the address: the listener has ended."""


class AsyncClient:
    """Speaks to one address: each request has a connection to itself. Lives in one event loop."""

    def __init__(self, address: str, secret: Secret, *, connect_timeout_s: float = 3.0) -> None:
        """`address` is "host:port". Raises ValueError for another form."""
        host, _, port = address.rpartition(":")
        self.address = address
        self._host, self._port = host.strip("[]"), int(port)
        self._secret, self._connect_seconds = secret, connect_timeout_s
        self._tls = secret.client_tls
        self._idle_connections: list[_AsyncConnection] = []
        self._busy_connections: set[_AsyncConnection] = set()
        self._listener = ListenerIdentity(time.time)

    async def post(self, path: str, body: dict[str, Any], timeout: float = 10.0) -> dict[str, Any]:
        """The answer to one request, which belongs to no generation. `timeout` bounds all of it.

        A request may arrive twice when an idle connection was cut under it. Raises AgentEndedError,
        UnreachableError, FencedError, AuthError and RequestError as `Client.post` does.
        """
        content = json.dumps(body, separators=(",", ":")).encode()
        is_kept = bool(self._idle_connections)
        try:
            async with asyncio.timeout(timeout):
                try:
                    return await self._attempt(path, content)
                except OSError:
                    if not is_kept:
                        raise
                    self._close_idle()  # they are likely to be as dead
                    return await self._attempt(path, content)
        except ConnectionRefusedError as error:
            raise AgentEndedError(f"nobody listens at {self.address}") from error
        except TimeoutError as error:
            raise UnreachableError(
                f"no answer from {self.address} to {path} within {timeout:g} s"
            ) from error
        except OSError as error:
            raise UnreachableError(f"{self.address} cannot be reached: {error}") from error

    def close(self) -> None:
        """Cut all connections; the next request makes another."""
        for line in tuple(self._busy_connections):
            line.close()
        self._close_idle()

    def _close_idle(self) -> None:
        while self._idle_connections:
            self._idle_connections.pop().close()

    async def _attempt(self, path: str, content: bytes) -> dict[str, Any]:
        """A request that is signed for another listener is not done, and sent once more."""
        proof, status, data, digest = await self._exchange(path, content)
        if status == MISDIRECTED_STATUS:
            check_answer(self._secret, proof.nonce, status, data, digest)
            self._listener.update_from(parse_json(data))
            proof, status, data, digest = await self._exchange(path, content)
        return verify_answer(self._secret, self.address, proof, status, data, digest)

    async def _exchange(self, path: str, content: bytes) -> tuple[Proof, int, bytes, str]:
        """The proof that was sent, and of the answer: status, body, digest."""
        proof = self._listener.sign(self._secret, "POST", path, content, NO_GENERATION)
        while self._idle_connections and self._idle_connections[-1].is_closed:
            self._idle_connections.pop()
        line = self._idle_connections.pop() if self._idle_connections else await self._connect()
        self._busy_connections.add(line)
        try:
            status, data, digest = await line.request(self._request(path, content, proof))
        except BaseException:
            line.close()  # its answer would be taken for the next one's
            raise
        finally:
            self._busy_connections.discard(line)
        if line.is_closed:
            line.close()
        else:
            self._idle_connections.append(line)
        return proof, status, data, digest

    async def _connect(self) -> _AsyncConnection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_seconds):
                # asyncio turns Nagle's algorithm off by itself here.
                _, line = await loop.create_connection(
                    _AsyncConnection, self._host, self._port, ssl=self._tls
                )
        except ssl.SSLCertVerificationError:
            raise AuthError(f"{self.address} does not accept this run's secret") from None
        except ssl.SSLError as error:
            raise OSError(explain(error)) from error
        except TimeoutError as error:
            raise OSError(f"no connection within {self._connect_seconds:g} s") from error
        return line

    def _request(self, path: str, content: bytes, proof: Proof) -> bytes:
        lines = [
            f"POST {path} HTTP/1.1",
            f"host: {self.address}",
            "content-type: application/json",
            f"content-length: {len(content)}",
            *(f"{name}: {value}" for name, value in request_headers(proof, content).items()),
            "",
            "",
        ]
        return "\r\n".join(lines).encode("latin-1") + content


class _AsyncConnection(asyncio.Protocol):
    """A connection that asks: `request` raises OSError for whatever is no answer."""

    def __init__(self) -> None:
        self.is_closed = False
        """Whether it can be asked no more."""
        self._parser = httptools.HttpResponseParser(self)
        self._answer: asyncio.Future[tuple[int, bytes, str]] | None = None
        self._digest, self._data, self._size = "", bytearray(), 0

    async def request(self, request: bytes) -> tuple[int, bytes, str]:
        """Status, body, and what proves them."""
        if self.is_closed:
            raise ConnectionResetError("the connection is closed")
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._answer
        finally:
            self._answer = None

    def close(self) -> None:
        self.is_closed = True
        self._transport.abort()

    # --- of asyncio and of the parser -------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(ConnectionResetError("closed before an answer"))

    def data_received(self, data: bytes) -> None:
        if self._answer is None:  # no request was sent
            self.close()
            return
        self._size += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(ConnectionResetError(f"the answer is no HTTP: {error}"))
        if self._size > MAX_ANSWER_BYTES:
            self._fail(ConnectionResetError("the answer is too long"))

    def on_message_begin(self) -> None:
        self._digest, self._data = "", bytearray()

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"holdfast-hmac":
            self._digest = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self._data += body

    def on_message_complete(self) -> None:
        self._size = 0
        self.is_closed = self.is_closed or not self._parser.should_keep_alive()
        if self._answer is not None and not self._answer.done():
            status = self._parser.get_status_code()
            self._answer.set_result((status, bytes(self._data), self._digest))

    def _fail(self, error: OSError) -> None:
        self.is_closed = True
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
        self._transport.abort()
