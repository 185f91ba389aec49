"""Bytes of files over one connection, by a thread that waits.

sendfile(2) moves them from the memory of the file to the socket. TLS has no such way: a piece is
read, encrypted and sent.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable

STALLED_RECEIVER_TIMEOUT_S = 20.0
"""A receiver that takes nothing for so long is given up."""
ENCRYPTED_PIECE_BYTES = 256 << 10
"""Bytes that are copied and encrypted at a time; they stay in the processor's cache."""


class FileSender:
    """Sends on a socket that does not block."""

    def __init__(
        self, sock: socket.socket, encrypt: Callable[[memoryview], bytes] | None = None
    ) -> None:
        """encrypt: returns what TLS makes of some bytes; None: they leave as they are."""
        self._sock, self._encrypt = sock, encrypt
        self._poll = select.poll()
        self._poll.register(sock, select.POLLOUT)
        size = 0 if encrypt is None else ENCRYPTED_PIECE_BYTES
        self._buffer = memoryview(bytearray(size))

    def send(self, fd: int, offset: int, count: int) -> None:
        """Send bytes of a file. Raises OSError when the other end has closed, or takes nothing for
        STALLED_RECEIVER_TIMEOUT_S."""
        end = offset + count
        while offset < end:
            if self._encrypt is None:
                sock, left = self._sock.fileno(), end - offset
                moved = self._when_ready(os.sendfile, sock, fd, offset, left)
            elif moved := os.preadv(fd, [self._buffer[: end - offset]], offset):
                encrypted = memoryview(self._encrypt(self._buffer[:moved]))
                while encrypted:
                    encrypted = encrypted[self._when_ready(self._sock.send, encrypted) :]
            if not moved:
                raise ConnectionError("the file is shorter than it should be")
            offset += moved

    def _when_ready(self, send: Callable[..., int], *arguments: object) -> int:
        """Return how many bytes left, once the socket takes any."""
        while True:
            try:
                return send(*arguments)
            except BlockingIOError:
                if not self._poll.poll(STALLED_RECEIVER_TIMEOUT_S * 1000):
                    raise TimeoutError("the receiver takes nothing") from None
