"""Requests between the mover and its node's processes: JSON lines over a unix socket.

The socket lies in a folder that only its owner can enter, and the peer's user is checked. Every
request carries the same proof as a request over HTTP (method `MOVER`, path = verb). Every answer is
signed too. Memory files travel with an answer as descriptors (SCM_RIGHTS).

    request  {"verb": v, "body": "<json>", "proof": [generation, nonce, time, hmac]}
    answer   {"status": 200 | 400 | 401 | 409 | 500, "body": "<json>", "proof": hmac}

A fault is {"error": class, "message": text, ...} in the body. 409 means fenced.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.core.json_parsing import parsed
from holdfast.errors import (
    CheckpointError,
    CorruptError,
    FencedError,
    HoldfastError,
    OutOfSpaceError,
    RunFolderError,
    StoreError,
    UserError,
)
from holdfast.wire.http.auth import AuthError, Proof, check_answer, sign, sign_answer
from holdfast.wire.secret import Secret

METHOD = "MOVER"
LINE_LIMIT = 64 * 2**20
"""Longest line in bytes: a state table of some hundred thousand tensors."""

CHUNK = 2**16
"""Bytes that are read at a time: more would be memory that is mapped and unmapped each time."""

DESCRIPTORS = 253
"""The most descriptors that the kernel lets travel with one message."""

OK, REFUSED, UNKNOWN, FENCED, FAILED = 200, 400, 401, 409, 500


@dataclass(frozen=True, slots=True)
class Request:
    """One request, as received; `raw` is what the proof covers."""

    verb: str
    raw: bytes
    proof: Proof

    @property
    def body(self) -> dict[str, Any]:
        value = parsed(self.raw)
        if not isinstance(value, dict):
            raise ValueError("the body is not an object")
        return value


class LineReader:
    """Lines of a stream socket, and the descriptors that came with them."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._rest = bytearray()

    def line(self) -> tuple[bytes, list[int]] | None:
        """The next line without its end, and descriptors; None at the end of the stream.

        Raises OSError for what the socket does, ValueError for a line that is too long.
        """
        fds: list[int] = []
        looked = 0  # so far there is none
        while (end := self._rest.find(b"\n", looked)) < 0:
            looked = len(self._rest)
            if len(self._rest) > LINE_LIMIT:
                raise ValueError("the line is too long")
            data, new, _, _ = socket.recv_fds(self._connection, CHUNK, DESCRIPTORS)
            fds += new
            if not data:
                return None
            self._rest += data
        line = bytes(self._rest[:end])
        del self._rest[: end + 1]
        return line, fds


def request_line(
    secret: Secret, verb: str, body: dict[str, Any], generation: int, now: float
) -> tuple[bytes, str]:
    """A signed request, and its nonce."""
    raw = json.dumps(body, separators=(",", ":"))
    proof = sign(secret, METHOD, verb, raw.encode(), generation, now)
    fields = [proof.generation, proof.nonce, proof.time, proof.digest]
    line = json.dumps({"verb": verb, "body": raw, "proof": fields}, separators=(",", ":"))
    return line.encode() + b"\n", proof.nonce


def parse_request(line: bytes) -> Request:
    """Raises AuthError for anything that is not a request; its proof is not checked here."""
    try:
        value = parsed(line)
        generation, nonce, time, mac = value["proof"]
        return Request(
            str(value["verb"]),
            str(value["body"]).encode(),
            Proof(int(generation), str(nonce), float(time), str(mac)),
        )
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise AuthError("not a request", "no proof") from error


def answer_line(secret: Secret, nonce: str, status: int, body: dict[str, Any]) -> bytes:
    raw = json.dumps(body, separators=(",", ":"))
    mac = sign_answer(secret, nonce, status, raw.encode())
    line = json.dumps({"status": status, "body": raw, "proof": mac}, separators=(",", ":"))
    return line.encode() + b"\n"


def parse_answer(secret: Secret, nonce: str, line: bytes) -> dict[str, Any]:
    """The answer's body. Raises what the other side raised, and AuthError for a forged answer."""
    try:
        value = parsed(line)
        status, raw, mac = int(value["status"]), str(value["body"]).encode(), str(value["proof"])
        body = parsed(raw)
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise AuthError("not an answer") from error
    check_answer(secret, nonce, status, raw, mac)
    if status != OK:
        raise _error(body)
    return dict(body)


_KINDS: dict[str, type[HoldfastError]] = {
    kind.__name__: kind for kind in (FencedError, CorruptError, AuthError)
}


_SPOKEN: dict[str, type[UserError]] = {
    kind.__name__: kind for kind in (CheckpointError, StoreError, RunFolderError, OutOfSpaceError)
}


def describe(error: HoldfastError) -> dict[str, Any]:
    """An error as the body of an answer."""
    if isinstance(error, UserError):
        names = (kind.__name__ for kind in type(error).__mro__)
        return {
            "error": next((name for name in names if name in _SPOKEN), "CheckpointError"),
            "message": error.message, "where": error.where, "remedy": error.remedy,
        }  # fmt: skip
    return {"error": type(error).__name__, "message": str(error)}


def _error(body: dict[str, Any]) -> HoldfastError:
    message = str(body.get("message"))
    name = str(body.get("error"))
    if name in _SPOKEN:
        return _SPOKEN[name](message, where=body.get("where"), remedy=body.get("remedy"))
    return _KINDS.get(name, HoldfastError)(message)


def send(connection: socket.socket, line: bytes, fds: Sequence[int] = ()) -> None:
    """Send a complete line; descriptors travel with its first byte."""
    if fds:
        sent = socket.send_fds(connection, [line], list(fds))
        line = line[sent:]
    connection.sendall(line)
