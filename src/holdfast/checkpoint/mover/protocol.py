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

from holdfast.checkpoint.mover import messages
from holdfast.core.json_parsing import JsonObject, ParsedJson, parse_json
from holdfast.errors import (
    CheckpointError,
    CorruptError,
    FencedError,
    HoldfastError,
    NoRoomError,
    OutOfSpaceError,
    RunFolderError,
    StoreError,
    UserError,
)
from holdfast.wire.http.auth import AuthError, Proof, check_answer, sign, sign_answer
from holdfast.wire.secret import Secret

METHOD = "MOVER"
MAX_LINE_BYTES = 64 * 2**20
"""Longest line in bytes: a state table of some hundred thousand tensors."""

RECEIVE_BYTES = 2**16
"""Bytes that are read at a time: more would be memory that is mapped and unmapped each time."""

MAX_DESCRIPTORS = 253
"""The most descriptors that the kernel lets travel with one message."""

OK, REFUSED, UNKNOWN, FENCED, FAILED = 200, 400, 401, 409, 500


@dataclass(frozen=True, slots=True)
class MoverRequest:
    """One request, as received; `raw` is what the proof covers."""

    verb: str
    raw: bytes
    proof: Proof

    def message(self) -> messages.Request:
        """Raises HoldfastError for an unknown verb, and KeyError, TypeError, ValueError for a
        malformed body."""
        value = parse_json(self.raw)
        if not isinstance(value, dict):
            raise ValueError("the body is not an object")
        if (kind := messages.REQUESTS.get(self.verb)) is None:
            raise HoldfastError(f"the mover has no verb {self.verb!r}")
        return kind.from_json(value)


class LineReader:
    """Lines of a stream socket, and the descriptors that came with them."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._rest = bytearray()

    def read_line(self) -> tuple[bytes, list[int]] | None:
        """The next line without its end, and descriptors; None at the end of the stream.

        Raises OSError for what the socket does, ValueError for a line that is too long.
        """
        fds: list[int] = []
        looked = 0  # so far there is none
        while (end := self._rest.find(b"\n", looked)) < 0:
            looked = len(self._rest)
            if len(self._rest) > MAX_LINE_BYTES:
                raise ValueError("the line is too long")
            data, new, _, _ = socket.recv_fds(self._connection, RECEIVE_BYTES, MAX_DESCRIPTORS)
            fds += new
            if not data:
                return None
            self._rest += data
        line = bytes(self._rest[:end])
        del self._rest[: end + 1]
        return line, fds


def encode_request(
    secret: Secret, verb: str, body: JsonObject, generation: int, now: float
) -> tuple[bytes, str]:
    """A signed request, and its nonce."""
    raw = json.dumps(body, separators=(",", ":"))
    proof = sign(secret, METHOD, verb, raw.encode(), generation, now)
    fields = [proof.generation, proof.nonce, proof.time, proof.digest]
    line = json.dumps({"verb": verb, "body": raw, "proof": fields}, separators=(",", ":"))
    return line.encode() + b"\n", proof.nonce


def parse_request(line: bytes) -> MoverRequest:
    """Raises AuthError for anything that is not a request; its proof is not checked here."""
    try:
        value = parse_json(line)
        generation, nonce, time, mac = value["proof"]
        return MoverRequest(
            str(value["verb"]),
            str(value["body"]).encode(),
            Proof(int(generation), str(nonce), float(time), str(mac)),
        )
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise AuthError("not a request", "no proof") from error


def encode_answer(secret: Secret, nonce: str, status: int, body: JsonObject) -> bytes:
    raw = json.dumps(body, separators=(",", ":"))
    mac = sign_answer(secret, nonce, status, raw.encode())
    line = json.dumps({"status": status, "body": raw, "proof": mac}, separators=(",", ":"))
    return line.encode() + b"\n"


def parse_answer(secret: Secret, nonce: str, line: bytes) -> JsonObject:
    """The answer's body. Raises what the other side raised, and AuthError for a forged answer."""
    try:
        value = parse_json(line)
        status, raw, mac = int(value["status"]), str(value["body"]).encode(), str(value["proof"])
        body = parse_json(raw)
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise AuthError("not an answer") from error
    check_answer(secret, nonce, status, raw, mac)
    if status != OK:
        raise error_from_json(body)
    return dict(body)


_ERROR_TYPES: dict[str, type[HoldfastError]] = {
    kind.__name__: kind for kind in (FencedError, CorruptError, AuthError, NoRoomError)
}

_USER_ERROR_TYPES: dict[str, type[UserError]] = {
    kind.__name__: kind for kind in (CheckpointError, StoreError, RunFolderError, OutOfSpaceError)
}


def error_to_json(error: HoldfastError) -> JsonObject:
    """An error as the body of an answer."""
    if isinstance(error, UserError):
        names = (kind.__name__ for kind in type(error).__mro__)
        return {
            "error": next((name for name in names if name in _USER_ERROR_TYPES), "CheckpointError"),
            "message": error.message,
            "where": error.where,
            "remedy": error.remedy,
        }
    return {"error": type(error).__name__, "message": str(error)}


def error_from_json(body: ParsedJson) -> HoldfastError:
    message = str(body.get("message"))
    name = str(body.get("error"))
    if name in _USER_ERROR_TYPES:
        return _USER_ERROR_TYPES[name](message, where=body.get("where"), remedy=body.get("remedy"))
    return _ERROR_TYPES.get(name, HoldfastError)(message)


def send_line(connection: socket.socket, line: bytes, fds: Sequence[int] = ()) -> None:
    """Send a complete line; descriptors travel with its first byte."""
    if fds:
        sent = socket.send_fds(connection, [line], list(fds))
        line = line[sent:]
    connection.sendall(line)
