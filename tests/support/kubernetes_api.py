"""An API server with one kind of nodes and one of pods. It has real TLS with an authority of its
own, a bearer token, lists, watches in chunks, and versions that expire (410)."""

from __future__ import annotations

import copy
import ipaddress
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

NODES, PODS = "/api/v1/nodes", "/api/v1/namespaces/training/pods"


@dataclass
class Kube:
    """What the server holds. `account`: a folder with token, ca.crt and namespace."""

    address: str
    account: Path
    token: str = "first"
    illness: str = ""  # "refuses" (500), "page" (HTML), "garbage" (a line of a watch is no JSON)
    version: int = 100
    forgotten: int = 0  # watches from this version or an older one are refused with 410
    late_410: bool = False  # ... inside the watch, as an event
    objects: dict[str, dict[str, Any]] = field(default_factory=lambda: {NODES: {}, PODS: {}})
    events: list[tuple[int, str, str, Any]] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    watching: int = 0
    cut: int = 0  # watches that began before this count are broken off
    begun: int = 0
    over: threading.Event = field(default_factory=threading.Event)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def put(self, kind: str, name: str, change: Callable[[dict[str, Any]], object]) -> None:
        """Make an object, or change it, and notify the watchers."""
        with self.lock:
            what = {NODES: "Node", PODS: "Pod"}[kind]
            found = self.objects[kind].setdefault(
                name, {"kind": what, "metadata": {"name": name, "uid": f"{what}-{name}"}}
            )
            fresh = "resourceVersion" not in found["metadata"]
            change(found)
            self._tell(kind, "ADDED" if fresh else "MODIFIED", found)

    def delete(self, kind: str, name: str) -> None:
        with self.lock:
            self._tell(kind, "DELETED", self.objects[kind].pop(name))

    def bookmark(self, kind: str) -> None:
        with self.lock:
            self._tell(kind, "BOOKMARK", {"kind": "Node", "metadata": {}})

    def _tell(self, kind: str, what: str, found: dict[str, Any]) -> None:
        self.version += 1
        found["metadata"]["resourceVersion"] = str(self.version)
        self.events.append((self.version, kind, what, copy.deepcopy(found)))

    def watches(self) -> int:
        return sum("watch=1" in path for path in self.asked)

    def lists(self) -> int:
        return sum("watch=1" not in path for path in self.asked)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    world: Kube

    def do_GET(self) -> None:
        world = self.world
        with world.lock:
            world.asked.append(self.path)
        parts = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        if world.illness == "refuses":
            return self._send(500, {"kind": "Status", "code": 500})
        if world.illness == "page":
            return self._send(200, b"<html>proxy</html>")
        if self.headers["Authorization"] != f"Bearer {world.token}":
            return self._send(401, {"kind": "Status", "code": 401})
        if parts.path not in world.objects:
            kind, _, name = parts.path.rpartition("/")
            found = world.objects.get(kind, {}).get(name)
            return self._send(200 if found else 404, found or {"kind": "Status", "code": 404})
        wanted = query["fieldSelector"].removeprefix("metadata.name=")
        if query.get("watch") == "1":
            return self._watch(parts.path, wanted, query)
        with world.lock:
            items = [o for name, o in world.objects[parts.path].items() if name == wanted]
            version = {"resourceVersion": str(world.version)}
            return self._send(200, {"kind": "List", "metadata": version, "items": items})

    def _send(self, status: int, value: Any) -> None:
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def _watch(self, kind: str, name: str, query: dict[str, str]) -> None:
        world, since = self.world, int(query["resourceVersion"])
        gone = {"kind": "Status", "code": 410, "message": "too old resource version"}
        old = since <= world.forgotten
        if old and not world.late_410:
            return self._send(410, gone)
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with world.lock:
            world.begun += 1
            number = world.begun
            world.watching += 1
        try:
            if old:
                self._chunk({"type": "ERROR", "object": gone})
            else:
                self._tell(kind, name, since, number, float(query["timeoutSeconds"]))
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            pass
        finally:
            self.close_connection = True
            with world.lock:
                world.watching -= 1

    def _tell(self, kind: str, name: str, since: int, number: int, seconds: float) -> None:
        world, until = self.world, time.monotonic() + seconds
        while not world.over.is_set() and time.monotonic() < until:
            with world.lock:
                news = [e for e in world.events if e[0] > since and e[1] == kind]
                broken = number <= world.cut
            for version, _, what, found in news:
                since = version
                if what == "BOOKMARK" or found["metadata"]["name"] == name:
                    self._chunk({"type": what, "object": found})
            if world.illness == "garbage":
                self._raw(b"{half\n")
            if broken:
                self._raw(b'{"type": "MODIFIED", "object": {"meta')
                raise OSError("cut")
            world.over.wait(0.005)

    def _chunk(self, value: Any) -> None:
        self._raw(json.dumps(value).encode() + b"\n")

    def _raw(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def api_server(folder: Path) -> Iterator[Kube]:
    """At `address` until the block ends; the account's files lie in `folder`."""
    certificate = authority_and_server(folder)
    (folder / "token").write_text("first\n")
    (folder / "namespace").write_text("training")

    class Handler(_Handler):
        pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: Any, address: Any) -> None:
            pass  # a client that does not trust us

    with Server(("127.0.0.1", 0), Handler) as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(
            server.socket, server_side=True, do_handshake_on_connect=False
        )
        world = Handler.world = Kube(f"https://127.0.0.1:{server.server_address[1]}", folder)
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield world
        finally:
            world.over.set()
            server.shutdown()
            thread.join()
            with suppress(OSError):
                server.socket.close()


def authority_and_server(folder: Path) -> Path:
    """Writes ca.crt, the authority; returns the file with the server's certificate and key."""
    folder.mkdir(parents=True, exist_ok=True)
    authority = ec.generate_private_key(ec.SECP256R1())
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)
    issuer = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test authority")])
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "api server")])

    def signed(name: x509.Name, public: Any, *extensions: x509.ExtensionType) -> bytes:
        builder = (
            x509.CertificateBuilder()
            .issuer_name(issuer)
            .subject_name(name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=1))
        )
        for extension in extensions:
            builder = builder.add_extension(extension, isinstance(extension, x509.BasicConstraints))
        return builder.sign(authority, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    (folder / "ca.crt").write_bytes(
        signed(issuer, authority.public_key(), x509.BasicConstraints(True, None))
    )
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    both = folder / "server.pem"
    both.write_bytes(
        signed(subject, key.public_key(), names)
        + key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return both
