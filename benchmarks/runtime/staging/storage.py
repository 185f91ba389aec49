"""The far end of a link with a fixed number of bytes a second.

A process of its own: `python -m benchmarks.runtime.staging.storage BYTES_PER_SECOND` prints its
address. It is the network storage of the comparison, and the memory of a staging node for a trainer
that has none of its own. What arrives is kept in memory, so the link is its only limit; one token
bucket serves all connections. A connection is one request: a JSON line, then for a `put` the bytes
up to the end of the stream. The answer comes when all of them are kept.

`NetworkStore` is a run store whose blobs lie there; the small objects stay in a folder.
"""

from __future__ import annotations

import io
import json
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

from holdfast.checkpoint.peers.rate_limiter import TokenBucket
from holdfast.wire.store.run_store import (
    AlreadyExistsError,
    FolderStore,
    MissingKeyError,
    byte_views,
)

CHUNK = 4 * 2**20
PIECE = 256 * 2**10
"""Bytes between two looks at the bucket."""
SENT = 2**20
"""Bytes that a sender gathers before it sends them."""
SILENCE = 120.0


class Objects:
    """The kept bytes, in chunks. Chunks of a removed object are reused, so that from the second
    save on no page is new."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[str, tuple[list[bytearray], int]] = {}
        self._free: list[bytearray] = []

    def chunk(self) -> bytearray:
        with self._lock:
            return self._free.pop() if self._free else bytearray(CHUNK)

    def keep(self, key: str, parts: list[bytearray], size: int) -> None:
        self.delete(key)
        with self._lock:
            self._kept[key] = parts, size

    def delete(self, prefix: str) -> None:
        with self._lock:
            for key in [key for key in self._kept if key.startswith(prefix)]:
                self._free += self._kept.pop(key)[0]

    def rename(self, key: str, to: str) -> None:
        with self._lock:
            self._kept[to] = self._kept.pop(key)

    def size(self, key: str) -> int:
        with self._lock:
            return self._kept[key][1] if key in self._kept else -1

    def read(self, key: str, start: int, stop: int) -> bytes:
        with self._lock:
            parts, size = self._kept[key]
        first = start // CHUNK
        some = b"".join(bytes(part) for part in parts[first : -(-min(stop, size) // CHUNK)])
        return some[start - first * CHUNK : min(stop, size) - first * CHUNK]


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, rate: float) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects = Objects()
        self.budget = TokenBucket(rate, time.monotonic, time.sleep, burst=rate * 0.01)


class _Handler(socketserver.StreamRequestHandler):
    server: _Server
    rbufsize = 0  # what follows the line goes straight into a chunk

    def handle(self) -> None:
        asked = json.loads(self._line())
        objects, key = self.server.objects, asked["key"]
        answer: dict[str, Any] = {}
        match asked["verb"]:
            case "put":
                answer["size"] = self._put(key)
            case "size":
                answer["size"] = objects.size(key)
            case "delete":
                objects.delete(key)
            case "rename":
                objects.rename(key, asked["to"])
            case "get":
                self.wfile.write(objects.read(key, asked["start"], asked["stop"]))
                return
        self.wfile.write(json.dumps(answer).encode() + b"\n")

    def _line(self) -> bytes:
        line = bytearray()
        while not line.endswith(b"\n"):
            if not (some := self.connection.recv(1)):
                raise ConnectionError("no request")
            line += some
        return bytes(line)

    def _put(self, key: str) -> int:
        parts: list[bytearray] = []
        at, size = CHUNK, 0
        while True:
            if at == CHUNK:
                parts.append(self.server.objects.chunk())
                at = 0
            with memoryview(parts[-1]) as view:
                count = self.connection.recv_into(view[at : at + PIECE])
            if not count:
                break
            at, size = at + count, size + count
            self.server.budget.take(count)
        self.server.objects.keep(key, parts, size)
        return size


class Storage:
    """Its client. Every request makes its own connection; may be shared between threads."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._at = host, int(port)

    def put(self, key: str, data: Iterable[bytes | bytearray | memoryview]) -> int:
        """The size, once every byte is kept there."""
        with Sink(self, key) as sink:
            for some in data:
                sink.write(some)
        return sink.size

    def size(self, key: str) -> int:
        """-1: there is none."""
        return int(self._ask({"verb": "size", "key": key})["size"])

    def delete(self, prefix: str) -> None:
        self._ask({"verb": "delete", "key": prefix})

    def rename(self, key: str, to: str) -> None:
        self._ask({"verb": "rename", "key": key, "to": to})

    def get(self, key: str, start: int, stop: int) -> bytes:
        with self.open({"verb": "get", "key": key, "start": start, "stop": stop}) as connection:
            return connection.makefile("rb").read()

    def open(self, request: dict[str, Any]) -> socket.socket:
        connection = socket.create_connection(self._at, SILENCE)
        connection.sendall(json.dumps(request).encode() + b"\n")
        return connection

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        with self.open(request) as connection:
            return _answer(connection)


class Sink(io.RawIOBase):
    """A stream into one object, which is there when `close` has returned."""

    def __init__(self, storage: Storage, key: str) -> None:
        self._connection = storage.open({"verb": "put", "key": key})
        self._at = 0
        self.size = -1

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        with memoryview(data) as view:
            self._connection.sendall(view)
            self._at += view.nbytes
            return view.nbytes

    def tell(self) -> int:
        return self._at

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        with self._connection:
            self._connection.shutdown(socket.SHUT_WR)
            self.size = int(_answer(self._connection)["size"])
        if self.size != self._at:
            raise ConnectionError(f"{self.size} of {self._at} bytes were kept")


def _answer(connection: socket.socket) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(connection.makefile("rb").readline())
    return found


class NetworkStore(FolderStore):
    """Blobs lie in the storage; the folder has an empty file in place of each."""

    def __init__(self, folder: str, storage: Storage) -> None:
        super().__init__(folder)
        self._storage = storage

    def create(self, key: str, data: Any) -> None:
        if not _blob(key):
            super().create(key, data)
            return
        if super().list(key):
            raise AlreadyExistsError(f"{key} exists already")
        self._storage.put(key, byte_views(data))
        super().create(key, b"")

    def size(self, key: str) -> int:
        found = super().size(key)
        if not _blob(key):
            return found
        kept = self._storage.size(key)
        if kept < 0:
            raise MissingKeyError(f"there is no {key}")
        return kept

    def scatter(self, key: str, start: int, outs: Sequence[memoryview]) -> None:
        if not _blob(key):
            super().scatter(key, start, outs)
            return
        for out in outs:
            out[:] = self._storage.get(key, start, start + len(out))
            start += len(out)

    def delete(self, key: str) -> None:
        super().delete(key)
        if _blob(key):
            self._storage.delete(key)


def _blob(key: str) -> bool:
    return key.endswith(".safetensors")


def main() -> None:
    with _Server(float(sys.argv[1])) as server:
        host, port = server.server_address[:2]
        print(json.dumps({"address": f"{host!s}:{port}"}), flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
