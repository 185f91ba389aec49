"""Requests to an agent: JSON over HTTP/1.1, signed, on connections that stay open.

`exchange` is all of the machinery: a round trip costs a fraction of a general HTTP library's, and a
worker makes several a second.
"""

from __future__ import annotations

import json
import threading
import time
from functools import partial
from typing import Any, cast

from holdfast.core.json_parsing import parse_json
from holdfast.errors import FencedError, HoldfastError
from holdfast.wire.http.auth import (
    MISDIRECTED_STATUS,
    AuthError,
    ListenerIdentity,
    Proof,
    check_answer,
    request_headers,
)
from holdfast.wire.http.connection_pool import ConnectionPool
from holdfast.wire.http.sync_connection import HttpFormatError, SyncConnection
from holdfast.wire.http.tls import UPGRADE_STATUS, wants_tls
from holdfast.wire.secret import Secret

NO_GENERATION = 0
"""The generation of a request that belongs to none, such as the check for a trainer."""

MAX_ANSWER_BYTES = 64 << 20
"""Bytes of an answer at most, so that a stranger that has the port now cannot fill our memory."""


class UnreachableError(HoldfastError):
    """No process answered at the address before the deadline."""


class RequestError(HoldfastError):
    """The agent understood who asks, and refused what was asked. `status` is HTTP's."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message)


class Client:
    """Speaks to one agent. Threads may share it: each request has a connection to itself."""

    def __init__(
        self,
        address: str,
        secret: Secret,
        generation: int = NO_GENERATION,
        *,
        connect_retry_s: float = 2.0,
    ) -> None:
        """`address` is "host:port"; `connect_retry_s` is how many seconds a refused connection is
        tried again for (an agent that is about to listen)."""
        host, _, port = address.rpartition(":")
        self.address = address
        self.generation = generation
        connect = partial(SyncConnection, host.strip("[]"), int(port), tls=secret.client_tls)
        self._connections = ConnectionPool(connect)
        self._secret = secret
        self._connect_retry_s = connect_retry_s
        self._listener = ListenerIdentity(time.time)
        self._pause = threading.Event()  # set by close(): ends a wait between two attempts

    def post(self, path: str, body: dict[str, Any], timeout: float = 10.0) -> dict[str, Any]:
        """The answer to one request. `timeout` bounds the answer's silence, in seconds.

        A request may arrive twice when an idle connection was cut under it, so what must not happen
        twice carries a number of its own. Raises FencedError when the agent knows a newer
        generation, UnreachableError, RequestError. Raises AuthError if the answer is not our
        agent's, or the agent does not take us for its worker.
        """
        content = json.dumps(body, separators=(",", ":")).encode()
        deadline = time.monotonic() + self._connect_retry_s
        pause = 0.01
        while True:
            try:
                return self._attempt(path, content, timeout)
            except HttpFormatError as error:
                raise UnreachableError(f"{self.address} cannot be reached: {error}") from error
            except ConnectionAbortedError as error:
                raise UnreachableError(f"no more requests to {self.address}: {error}") from error
            except ConnectionError as error:
                if time.monotonic() + pause > deadline or self._pause.wait(pause):
                    raise UnreachableError(f"nobody answers at {self.address}") from error
                pause = min(2 * pause, 0.25)
            except TimeoutError as error:
                raise UnreachableError(
                    f"no answer from {self.address} to {path} within {timeout:g} s"
                ) from error
            except OSError as error:
                raise UnreachableError(f"{self.address} cannot be reached: {error}") from error

    def close(self) -> None:
        """Close idle connections and end waits for new ones."""
        self._pause.set()
        self._connections.close()

    def abort(self) -> None:
        """End the requests that are under way in other threads, and refuse later ones: they raise
        UnreachableError. What was asked may have been done."""
        self._pause.set()
        self._connections.abort()

    def _attempt(self, path: str, content: bytes, timeout: float) -> dict[str, Any]:
        """A request that is signed for another listener is not done, and sent once more."""
        proof, status, data, digest = self._exchange(path, content, timeout)
        if status == MISDIRECTED_STATUS:
            check_answer(self._secret, proof.nonce, status, data, digest)
            self._listener.update_from(parse_json(data))
            proof, status, data, digest = self._exchange(path, content, timeout)
        return verify_answer(self._secret, self.address, proof, status, data, digest)

    def _exchange(self, path: str, content: bytes, timeout: float) -> tuple[Proof, int, bytes, str]:
        """The proof that was sent, and of the answer: status, body, digest."""
        proof = self._listener.sign(self._secret, "POST", path, content, self.generation)
        headers = {"content-type": "application/json", **request_headers(proof, content)}
        with self._connections.lend(timeout) as connection:
            answer = connection.request("POST", path, headers, content)
            data = answer.read(MAX_ANSWER_BYTES)
        return proof, answer.status, data, answer.header("holdfast-hmac")


def verify_answer(
    secret: Secret, address: str, proof: Proof, status: int, data: bytes, digest: str
) -> dict[str, Any]:
    """The answer's value, once it has proven whose it is. Raises as `Client.post` does."""
    if status == 401:  # the agent cannot sign for a stranger
        raise AuthError(f"{address} does not accept this run's secret")
    if status == UPGRADE_STATUS:
        raise AuthError(wants_tls(address))
    check_answer(secret, proof.nonce, status, data, digest)
    value = parse_json(data)
    if status == 409:
        raise FencedError(str(value.get("error", "a newer generation exists")))
    if status == MISDIRECTED_STATUS:
        raise AuthError(f"{address} changes its name at every request")
    if status != 200:
        raise RequestError(status, str(value.get("error", f"HTTP status {status}")))
    return cast(dict[str, Any], value)
