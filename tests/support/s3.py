"""A server that speaks S3 (moto, in a process of its own), and a proxy that counts, fails and
stalls.

The server starts at the first use in a test process and ends with it, for any end of the process.
It reads its standard input and exits when that is closed.
"""

from __future__ import annotations

import atexit
import datetime
import http.client
import http.server
import ipaddress
import os
import socket
import ssl
import subprocess
import sys
import textwrap
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "not-a-secret"}
BUCKET = "runs"
SERVER_VARIABLE = "HOLDFAST_TEST_S3"

_SERVER = """
    import functools, os, sys, threading
    def until_closed():
        sys.stdin.buffer.read()
        os._exit(0)
    threading.Thread(target=until_closed, daemon=True).start()
    from moto.s3.models import S3Backend
    from moto.s3.responses import S3Response
    from moto.server import ThreadedMotoServer
    from werkzeug.serving import WSGIRequestHandler
    # Head and body are two segments, of which the second would wait 40 ms for the first one's ACK.
    WSGIRequestHandler.disable_nagle_algorithm = True
    # moto looks whether an object is there and then puts it: two threads at once may both win. A
    # listing in which another thread deletes an object is answered with 500.
    lock = threading.RLock()
    def alone(owner, name):
        call = getattr(owner, name)
        @functools.wraps(call)
        def locked(*values, **named):
            with lock:
                return call(*values, **named)
        setattr(owner, name, locked)
    alone(S3Response, "put_object")
    for name in (
        *("list_objects", "list_objects_v2", "list_object_versions"),
        *("delete_object", "delete_objects", "copy_object", "complete_multipart_upload"),
    ):
        alone(S3Backend, name)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    print(*server.get_host_and_port(), flush=True)
    threading.Event().wait()
"""


@cache
def server() -> tuple[str, int]:
    """(host, port) of this test process's S3 server, with one bucket.

    HOLDFAST_TEST_S3=HOST:PORT names another server, with these credentials and this bucket.
    HOLDFAST_TEST_S3=ceph starts one."""
    if given := os.environ.get(SERVER_VARIABLE):
        if given == "ceph":
            from tests.support.ceph import gateway

            return gateway(CREDENTIALS, BUCKET)
        host_given, _, port_given = given.rpartition(":")
        return host_given, int(port_given)
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(_SERVER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    host, port = process.stdout.readline().split()
    atexit.register(_end, process)
    address = host.decode(), int(port)
    assert ask(address, "PUT", f"/{BUCKET}") == 200
    return address


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(120)
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


def ask(address: tuple[str, int], method: str, path: str, body: bytes = b"") -> int:
    """Return the status of one unsigned request."""
    connection = http.client.HTTPConnection(*address, timeout=120)
    try:
        connection.request(method, path, body)
        response = connection.getresponse()
        response.read()
        return response.status
    finally:
        connection.close()


def location(address: tuple[str, int], prefix: str = "", **options: Any) -> str:
    """Return the location of an unused prefix."""
    found = {"endpoint": f"http://{address[0]}:{address[1]}", "allow_http": "true"} | options
    query = "&".join(f"{name}={value}" for name, value in found.items())
    return f"s3://{BUCKET}/{prefix or uuid.uuid4().hex}?{query}"


class Request(NamedTuple):
    method: str
    key: str  # the path below the bucket
    query: str
    sent: int  # bytes of the body

    @property
    def kind(self) -> str:
        """What it is for: LIST is a GET of the bucket itself."""
        return "LIST" if self.method == "GET" and not self.key else self.method


def removes(request: Request) -> bool:
    """Whether objects are to be removed; which ones stands in the body."""
    return request.method == "DELETE" or (request.method == "POST" and "delete" in request.query)


@dataclass(frozen=True)
class Fault:
    """A fault instead of an answer. `status` answers with an error, 0 with nothing at all. In that
    case the connection is closed, after `after` bytes of the true answer if that is above 0. With
    `hold` it stays open and silent. With `forward` the server has carried out the request."""

    status: int = 0
    code: str = "InternalError"
    after: int = 0
    forward: bool = False
    hold: bool = False


Rule = Callable[[Request], Fault | None]


class Proxy:
    """Speaks HTTP to both sides. `rule` says what becomes of each request; it may block."""

    def __init__(
        self,
        upstream: tuple[str, int],
        tls: ssl.SSLContext | None = None,
        listener: socket.socket | None = None,
    ) -> None:
        """listener: a socket that listens already, such as one of another network."""
        self.log: list[Request] = []
        self.rule: Rule = lambda request: None
        self.drop_headers: frozenset[str] = frozenset()
        self.closing = threading.Event()
        proxy = self

        class Handler(_Handler):
            owner = proxy
            target = upstream

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        if listener is not None:
            self._server.socket.close()
            self._server.socket = listener
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.address: tuple[str, int] = self._server.socket.getsockname()[:2]
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def sent(self, part_of_key: str) -> int:
        """Bytes that PUTs of such objects carried."""
        return sum(r.sent for r in self.log if r.method == "PUT" and part_of_key in r.key)

    def kinds(self) -> list[str]:
        return [request.kind for request in self.log]

    def close(self) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(120)


@contextmanager
def proxied(tls: ssl.SSLContext | None = None) -> Iterator[Proxy]:
    proxy = Proxy(server(), tls)
    try:
        yield proxy
    finally:
        proxy.close()


def certificates(folder: Path) -> tuple[Path, ssl.SSLContext]:
    """The file of a made-up authority's certificate, and what a server at 127.0.0.1 shows."""
    now = datetime.datetime.now(datetime.UTC)
    authority, key = (
        ec.generate_private_key(ec.SECP256R1()),
        ec.generate_private_key(ec.SECP256R1()),
    )

    def signed(name: str, public: ec.EllipticCurvePublicKey, ca: bool) -> bytes:
        def named(text: str) -> x509.Name:
            return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

        builder = x509.CertificateBuilder(
            named("test authority"),
            named(name),
            public,
            x509.random_serial_number(),
            now - datetime.timedelta(hours=1),
            now + datetime.timedelta(hours=1),
        )
        builder = builder.add_extension(x509.BasicConstraints(ca, None), critical=True)
        if not ca:
            address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
            builder = builder.add_extension(x509.SubjectAlternativeName([address]), critical=False)
        made = builder.sign(authority, hashes.SHA256())
        return made.public_bytes(serialization.Encoding.PEM)

    root, own = folder / "authority.pem", folder / "server.pem"
    root.write_bytes(signed("test authority", authority.public_key(), True))
    own.write_bytes(
        signed("server", key.public_key(), False)
        + key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own)
    return root, context


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # as in `_SERVER`
    owner: Proxy
    target: tuple[str, int]

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path, _, query = self.path.partition("?")
        _, _, key = path.removeprefix("/").partition("/")
        request = Request(self.command, key, query, len(body))
        self.owner.log.append(request)
        fault = self.owner.rule(request)
        if self.owner.closing.is_set():
            self.close_connection = True
            return
        if fault is None:
            self._answer(*self._forward(body))
            return
        status, headers, data = self._forward(body) if fault.forward else (0, {}, b"")
        if fault.status:
            error = f"<Error><Code>{fault.code}</Code><Message>m</Message></Error>".encode()
            self._answer(fault.status, {"Content-Length": str(len(error))}, error)
            return
        if fault.after:
            self._answer(status, headers, data[: fault.after])
        if fault.hold:
            self.owner.closing.wait(120)
        self.close_connection = True

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve  # noqa: N815

    def _forward(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(*self.target, timeout=120)
        try:
            headers = {
                name: value
                for name, value in self.headers.items()
                if name.lower() not in self.owner.drop_headers
            }
            connection.request(self.command, self.path, body, headers)
            response = connection.getresponse()
            data = response.read()
            found = dict(response.getheaders())
            if self.command != "HEAD":
                found["Content-Length"] = str(len(data))
            return response.status, found, data
        finally:
            connection.close()

    def _answer(self, status: int, headers: dict[str, str], data: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("connection", "transfer-encoding"):
                self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on the screen of the tests."""
