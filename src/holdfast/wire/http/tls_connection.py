"""TLS under one HTTP connection of a listener: bytes are decrypted for it, and encrypted from it.

The HTTP connection exists from the first byte on. So its bounds hold for the handshake too: a
client that has proven nothing is cut in time. The oldest of a crowd is closed. (asyncio's own TLS
makes the connection only after the handshake, and keeps any number of unfinished ones.)
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

from holdfast.wire.http.connection import HttpConnection
from holdfast.wire.http.refusals import RefusalReason
from holdfast.wire.http.tls import UPGRADE_ANSWER, is_tls, refusal_reason

READ_BYTES = 64 << 10
"""Bytes that are decrypted at a time."""


class TlsConnection(asyncio.Protocol):
    """Made for each connection; lives in one event loop."""

    def __init__(self, connection: HttpConnection, context: ssl.SSLContext) -> None:
        self._connection = connection
        self._received, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._received, self._to_send, server_side=True)
        self._has_begun = self._is_ready = False  # a first byte has come; the handshake is done
        self._is_refused = False

    # --- of asyncio -------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._connection.connection_made(_EncryptingTransport(self, transport))

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()

    def eof_received(self) -> bool:
        return self._connection.eof_received()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if not self._has_begun:
            self._has_begun = True
            if not is_tls(data):
                self._transport.write(UPGRADE_ANSWER)
                self._refuse("not TLS")
                return
        self._received.write(data)
        try:
            self._advance()
        except ssl.SSLWantReadError:
            self._flush()
        except ssl.SSLError as error:
            self._flush()  # the alert, which tells the other end why
            self._refuse(refusal_reason(error))

    # --- of TLS -----------------------------------------------------------------------------
    def send(self, data: bytes) -> None:
        """Send bytes. A connection whose TLS has broken is cut."""
        try:
            encrypted = self.encrypt(data)
        except ssl.SSLError:
            self._transport.abort()
            return
        if not self._transport.is_closing():
            self._transport.write(encrypted)

    def encrypt(self, data: bytes | memoryview) -> bytes:
        """Return what is to be sent in place of some bytes. While a thread calls this, the
        connection reads nothing. Raises SSLError."""
        self._tls.write(data)
        return self._to_send.read()

    def _advance(self) -> None:
        """Decrypt what has come. Raises SSLWantReadError when more must come, SSLError."""
        if not self._is_ready:
            self._tls.do_handshake()
            self._is_ready = True
            self._flush()
        while not self._transport.is_closing():
            plain = self._tls.read(READ_BYTES)
            if not plain:  # the other end says that it has no more to say
                if not self._connection.eof_received():
                    self._transport.close()
                return
            self._connection.data_received(plain)

    def _flush(self) -> None:
        if (data := self._to_send.read()) and not self._transport.is_closing():
            self._transport.write(data)

    def _refuse(self, reason: RefusalReason) -> None:
        self._is_refused = True
        self._connection.count_refusal(reason)
        self._connection.close_gracefully()


class _EncryptingTransport(asyncio.Transport):
    """What an HTTP connection uses of a transport."""

    def __init__(self, tls: TlsConnection, transport: asyncio.Transport) -> None:
        super().__init__()
        self._tls, self._transport = tls, transport

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._tls.send(bytes(data))

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._tls.encrypt if name == "encrypt" else self._transport.get_extra_info(name)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._transport.set_write_buffer_limits(high, low)

    def close(self) -> None:
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()
