"""Messages between the agent and its fork server: lines of JSON over an inherited socket.

The socket pair has no name and no port. Only the two processes have its ends, so nothing is signed.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

from holdfast.core.json_parsing import parse_json


def encode_message(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


class LineDecoder:
    """Cuts received bytes into messages."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Yield the messages that `data` completes."""
        *whole, self._buffer = (self._buffer + data).split(b"\n")
        for line in whole:
            yield parse_json(line)


def receive_messages(control: socket.socket, decoder: LineDecoder) -> list[dict[str, Any]] | None:
    """Return the messages on a readable socket; None when the other end is closed."""
    data = control.recv(1 << 16)
    return list(decoder.feed(data)) if data else None
