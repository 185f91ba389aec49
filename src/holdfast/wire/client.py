"""Requests to an agent: JSON over HTTP/1.1, signed, on connections that stay open.

The standard library's `http.client` is the whole machinery: a round trip costs a third of what a
general HTTP library takes, and a worker makes several a second.
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from typing import Any, cast

from holdfast.errors import FencedError, HoldfastError
from holdfast.spec.parsing import parsed
from holdfast.wire.auth import AuthError, Proof, check_answer, sign
from holdfast.wire.secret import Secret

OUTSIDE = 0
"""The generation of a request that belongs to none, such as the question who is there."""


class UnreachableError(HoldfastError):
    """Nobody answered at the address before the deadline."""


class RequestError(HoldfastError):
    """The agent understood who asks, and refused what was asked. `status` is HTTP's."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message)


class Client:
    """Speaks to one agent. Threads may share it: each request has a connection to itself."""

    def __init__(
        self, address: str, secret: Secret, generation: int = OUTSIDE, *, patience: float = 2.0
    ) -> None:
        """`address` is "host:port"; `patience` is how many seconds a refused connection is tried
        again for (an agent that is about to listen)."""
        host, _, port = address.rpartition(":")
        self.address = address
        self.generation = generation
        self._host, self._port = host.strip("[]"), int(port)
        self._secret = secret
        self._patience = patience
        self._idle: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()
        self._pause = threading.Event()  # set by close(): ends a wait between two attempts

    def post(self, path: str, body: dict[str, Any], timeout: float = 10.0) -> dict[str, Any]:
        """The answer to one request. `timeout` bounds the answer's silence, in seconds.

        A request may arrive twice when an idle connection was cut under it, so what must not
        happen twice carries a number of its own. Raises FencedError when the agent knows a newer
        generation, UnreachableError, AuthError (who answers is not our agent, or does not take us
        for its worker), RequestError.
        """
        content = json.dumps(body, separators=(",", ":")).encode()
        deadline = time.monotonic() + self._patience
        pause = 0.01
        while True:
            try:
                return self._attempt(path, content, timeout)
            except (ConnectionRefusedError, ConnectionResetError, ConnectionAbortedError,
                    BrokenPipeError, http.client.BadStatusLine) as error:  # fmt: skip
                if time.monotonic() + pause > deadline or self._pause.wait(pause):
                    raise UnreachableError(f"nobody answers at {self.address}") from error
                pause = min(2 * pause, 0.25)
            except TimeoutError as error:
                raise UnreachableError(
                    f"no answer from {self.address} to {path} within {timeout:g} s"
                ) from error
            except (OSError, http.client.HTTPException) as error:
                raise UnreachableError(f"{self.address} cannot be reached: {error}") from error

    def close(self) -> None:
        """Close idle connections and end waits for new ones."""
        self._pause.set()
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _attempt(self, path: str, content: bytes, timeout: float) -> dict[str, Any]:
        proof = sign(self._secret, "POST", path, content, self.generation, time.time())
        connection = self._take(timeout)
        try:
            connection.request(
                "POST", path, content, {"content-type": "application/json", **proof.headers()}
            )
            response = connection.getresponse()
            data = response.read()
        except BaseException:
            connection.close()
            raise
        if response.will_close:
            connection.close()
        else:
            with self._lock:
                self._idle.append(connection)
        return self._judge(proof, response.status, data, response.getheader("holdfast-hmac", ""))

    def _take(self, timeout: float) -> http.client.HTTPConnection:
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is None:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout)
            connection.connect()
            # Headers and body leave in two writes; without this the second waits for an
            # acknowledgement of the first (Nagle's algorithm against delayed ones: 40 ms).
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        elif connection.sock is not None:
            connection.sock.settimeout(timeout)
        return connection

    def _judge(self, proof: Proof, status: int, data: bytes, digest: str | None) -> dict[str, Any]:
        if status == 401:  # the agent cannot sign for somebody it does not know
            raise AuthError(f"{self.address} does not accept this run's secret")
        if status == 413:  # refused unread, so nothing could be signed: send less
            raise RequestError(status, "the request is too long")
        check_answer(self._secret, proof.nonce, status, data, digest or "")
        value = parsed(data)
        if status == 409:
            raise FencedError(str(value.get("error", "a newer generation exists")))
        if status != 200:
            raise RequestError(status, str(value.get("error", f"HTTP status {status}")))
        return cast(dict[str, Any], value)
