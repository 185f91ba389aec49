"""`client`, for an event loop: signed JSON requests on one connection that stays open.

An agent holds one question open at its coordinator for as long as it lives, and a benchmark holds
thousands in one process: neither wants a thread for each. What is signed, and what an answer
proves, is the same as there.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from contextlib import suppress
from typing import Any

import h11

from holdfast.spec.parsing import parsed
from holdfast.wire.auth import MISDIRECTED, Aim, Proof, check_answer, headers_of
from holdfast.wire.client import ANSWER_LIMIT, OUTSIDE, UnreachableError, judged
from holdfast.wire.secret import Secret

READ_BYTES = 1 << 16


class DeadError(UnreachableError):
    """The machine answers that nobody listens at the address: who did has ended."""


class Talker:
    """Speaks to one address, one request at a time. Lives in one event loop."""

    def __init__(self, address: str, secret: Secret, *, connect_seconds: float = 3.0) -> None:
        """`address` is "host:port". Raises ValueError for another form."""
        host, _, port = address.rpartition(":")
        self.address = address
        self._host, self._port = host.strip("[]"), int(port)
        self._secret, self._connect_seconds = secret, connect_seconds
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._state = h11.Connection(h11.CLIENT)
        self._aim = Aim(time.time)
        self._turn = asyncio.Lock()

    @property
    def busy(self) -> bool:
        """Whether a request is under way; a second one would wait for it."""
        return self._turn.locked()

    async def post(self, path: str, body: dict[str, Any], timeout: float = 10.0) -> dict[str, Any]:
        """The answer to one request, which belongs to no generation. `timeout` bounds all of it.

        A request may arrive twice when an idle connection was cut under it. Raises DeadError,
        UnreachableError, FencedError, AuthError and RequestError as `Client.post` does.
        """
        content = json.dumps(body, separators=(",", ":")).encode()
        async with self._turn:
            kept = self._streams is not None
            try:
                async with asyncio.timeout(timeout):
                    try:
                        return await self._attempt(path, content)
                    except (OSError, h11.ProtocolError):
                        if not kept:
                            raise
                        return await self._attempt(path, content)
            except ConnectionRefusedError as error:
                raise DeadError(f"nobody listens at {self.address}") from error
            except TimeoutError as error:
                self.close()
                raise UnreachableError(
                    f"no answer from {self.address} to {path} within {timeout:g} s"
                ) from error
            except (OSError, h11.ProtocolError) as error:
                raise UnreachableError(f"{self.address} cannot be reached: {error}") from error
            except asyncio.CancelledError:
                self.close()  # its answer would be taken for the next one's
                raise

    def close(self) -> None:
        """Cut the connection; the next request makes another."""
        if self._streams is not None:
            _, writer = self._streams
            self._streams = None
            with suppress(OSError, RuntimeError):
                writer.close()

    async def _attempt(self, path: str, content: bytes) -> dict[str, Any]:
        """A request that is signed for another listener is not done, and sent once more."""
        proof, status, data, digest = await self._exchange(path, content)
        if status == MISDIRECTED:
            check_answer(self._secret, proof.nonce, status, data, digest)
            self._aim.learn(parsed(data))
            proof, status, data, digest = await self._exchange(path, content)
        return judged(self._secret, self.address, proof, status, data, digest)

    async def _exchange(self, path: str, content: bytes) -> tuple[Proof, int, bytes, str]:
        """The proof that was sent, and of the answer: status, body, digest."""
        proof = self._aim.sign(self._secret, "POST", path, content, OUTSIDE)
        try:
            if self._streams is None:
                await self._connect()
            await self._ask(path, content, proof)
            status, data, digest = await self._answer()
        except BaseException:
            self.close()
            raise
        if self._state.our_state is h11.DONE and self._state.their_state is h11.DONE:
            self._state.start_next_cycle()
        else:
            self.close()
        return proof, status, data, digest

    async def _connect(self) -> None:
        try:
            async with asyncio.timeout(self._connect_seconds):
                reader, writer = await asyncio.open_connection(self._host, self._port)
        except TimeoutError as error:
            raise OSError(f"no connection within {self._connect_seconds:g} s") from error
        found: socket.socket = writer.get_extra_info("socket")
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._streams = reader, writer
        self._state = h11.Connection(h11.CLIENT)

    async def _ask(self, path: str, content: bytes, proof: Proof) -> None:
        assert self._streams is not None
        _, writer = self._streams
        headers = {
            "host": self.address, "content-type": "application/json",
            "content-length": str(len(content)), **headers_of(proof, content),
        }  # fmt: skip
        request = h11.Request(method="POST", target=path, headers=list(headers.items()))
        parts = (request, h11.Data(data=content), h11.EndOfMessage())
        writer.write(b"".join(self._state.send(part) or b"" for part in parts))
        await writer.drain()

    async def _answer(self) -> tuple[int, bytes, str]:
        """Status, body, and what proves them."""
        assert self._streams is not None
        reader, _ = self._streams
        status, digest, data = 0, "", bytearray()
        while True:
            event = self._state.next_event()
            if event is h11.NEED_DATA:
                self._state.receive_data(await reader.read(READ_BYTES))
            elif isinstance(event, h11.Response):
                status = event.status_code
                digest = dict(event.headers).get(b"holdfast-hmac", b"").decode("latin-1")
            elif isinstance(event, h11.Data):
                data += event.data
                if len(data) > ANSWER_LIMIT:
                    raise ConnectionResetError("the answer is too long")
            elif isinstance(event, h11.EndOfMessage):
                return status, bytes(data), digest
            elif isinstance(event, h11.ConnectionClosed):
                raise ConnectionResetError("closed before an answer")
