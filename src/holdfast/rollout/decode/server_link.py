"""Requests to a server of the OpenAI protocol: time-outs, tries, and a key that stays hidden."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

from holdfast.errors import HoldfastError, UserError

KEY = "rollout.server"
_MAX_ANSWER_BYTES = 64 << 20
_MAX_PAUSE_S = 30.0  # between two tries
_TRY_AGAIN = (408, 409, 425, 429)  # status codes, besides all from 500
_SHOWN = 300  # characters of a server's message

Read = TypeVar("Read")


@dataclass(frozen=True)
class ServerAddress:
    """Where the server is, and how long it may take."""

    url: str  # such as http://host:8000/v1
    model: str  # as the server names it
    key_variable: str = ""  # environment variable with the key; empty: no key
    timeout_s: float = 600.0  # of one try, from the connection to the last byte
    tries: int = 6  # of one request


class ServerUnavailableError(HoldfastError):
    """The server gives no answer now. It may later."""


class BadAnswerError(Exception):
    """An answer that is none of the protocol. A later one may be."""


class ServerLink:
    """Sends requests, each on a connection of its own, from any thread. Raises UserError for an
    address that cannot be one, and for a key that is not there."""

    def __init__(self, address: ServerAddress, tries: int | None = None):
        self._address, self._tries = address, address.tries if tries is None else tries
        try:
            parts = urlsplit(address.url)
            self._port, self._host = parts.port, parts.hostname or ""
        except ValueError:
            parts, self._host = urlsplit(""), ""
        if parts.scheme not in ("http", "https") or not self._host or "@" in parts.netloc:
            raise UserError(
                "the server's address is not http://HOST:PORT/v1 or https://HOST/v1",
                where=KEY,
                remedy="correct it; a key belongs into an environment variable",
            )
        self._is_tls, self._path = parts.scheme == "https", parts.path
        self._key = os.environ.get(address.key_variable, "") if address.key_variable else ""
        if address.key_variable and not re.fullmatch("[!-~]+", self._key):
            raise UserError(
                f"the environment variable {address.key_variable} has no key of printable ASCII",
                where=KEY,
                remedy=f"export {address.key_variable}=KEY on each node",
            )
        self._is_interrupted = threading.Event()
        self._sockets: set[socket.socket] = set()

    def interrupt(self) -> None:
        """End all requests, and each later one."""
        self._is_interrupted.set()
        for opened in list(self._sockets):
            _shut(opened)

    def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None, read: Callable[[bytes], Read]
    ) -> Read:
        """Return what `read` makes of an answer. Raises UserError for an answer that no
        other try changes, ServerUnavailableError after the last try."""
        reason, pause_s = "", 0.0
        for number in range(self._tries):
            if number:
                self._is_interrupted.wait(min(pause_s or 0.5 * 2**number, _MAX_PAUSE_S))
            if self._is_interrupted.is_set():
                break
            pause_s = 0.0
            try:
                status, wait_s, data = self._try(method, path, body)
                if status == 200:
                    return read(data)
                said = self._message(data)
                if status < 500 and status not in _TRY_AGAIN:
                    raise self._refusal(status, said)
                reason, pause_s = f"it answers {status}{said}", wait_s
            except (OSError, http.client.HTTPException, BadAnswerError) as error:
                reason = self._masked(str(error) or type(error).__name__)
        raise ServerUnavailableError(
            f"the server {self._host} gives no answer to {path}: {reason or 'it was interrupted'}"
        )

    def _try(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> tuple[int, float, bytes]:
        """Return status, the seconds that the server asks to wait, and the answer's body. Raises
        OSError and HTTPException."""
        timeout_s = self._address.timeout_s
        if self._is_tls:
            tls = ssl.create_default_context()
            link: http.client.HTTPConnection = http.client.HTTPSConnection(
                self._host, self._port, timeout=timeout_s, context=tls
            )
        else:
            link = http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        link.connect()
        opened: socket.socket = link.sock
        is_late = threading.Event()

        def end() -> None:  # a server may send one byte now and then
            is_late.set()
            _shut(opened)

        timer = threading.Timer(timeout_s, end)
        timer.daemon = True
        timer.start()
        self._sockets.add(opened)
        try:
            if self._is_interrupted.is_set():
                raise ConnectionAbortedError("interrupted")
            data = None if body is None else json.dumps(body).encode()
            link.request(method, self._path.rstrip("/") + path, data, headers)
            answer = link.getresponse()
            content = answer.read(_MAX_ANSWER_BYTES)
            after = answer.headers.get("Retry-After") or ""
            return answer.status, float(after) if after.isdecimal() else 0.0, content
        except (OSError, http.client.HTTPException):
            if is_late.is_set():
                raise TimeoutError(f"no complete answer within {timeout_s:g} s") from None
            raise
        finally:
            timer.cancel()
            self._sockets.discard(opened)
            link.close()

    def _refusal(self, status: int, said: str) -> UserError:
        if status in (401, 403):
            name = self._address.key_variable
            remedy = f"put the right key into {name}" if name else "name the variable of a key"
            return UserError(f"the server refuses the key{said}", where=KEY, remedy=remedy)
        return UserError(
            f"the server refuses a request with {status}{said}",
            where=KEY,
            remedy=f"correct its address {self._address.url}, or what the message names",
        )

    def _message(self, data: bytes) -> str:
        """What the server says, for a line of a log."""
        try:
            value = json.loads(data)
        except ValueError:
            return ""
        inner = value.get("error", value) if isinstance(value, dict) else None
        said = inner.get("message") if isinstance(inner, dict) else inner
        line = " ".join(self._masked(str(said or "")).split())[:_SHOWN]
        return f" ({line})" if line else ""

    def _masked(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text


def _shut(opened: socket.socket) -> None:
    with suppress(OSError):
        opened.shutdown(socket.SHUT_RDWR)


def json_object(data: bytes) -> dict[str, Any]:
    """Return an answer's JSON object. Raises BadAnswerError for another answer."""
    try:
        value = json.loads(data)
    except ValueError:
        raise BadAnswerError("the answer is no JSON, or is cut off") from None
    if not isinstance(value, dict):
        raise BadAnswerError("the answer is no JSON object")
    return value
