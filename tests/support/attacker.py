"""Seeded bad requests, and the tools to send them: for tests of listeners that refuse.

The attacker has no secret. It knows the paths and the form of the requests. It has recorded
requests that were answered (`recorded`) and intercepted signed requests that never arrived
(`fresh`).
"""

from __future__ import annotations

import json
import os
import re
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from urllib.parse import quote

from holdfast.wire.http.auth import (
    ListenerIdentity,
    body_statement,
    request_headers,
    sha256_hex,
    sign,
)
from holdfast.wire.http.tls import listener_context
from holdfast.wire.secret import Secret

MARK = "left-by-an-attacker"
"""Part of many bad requests. No file or log of the run may contain it."""

GUESSED = Secret(b"guessed by the attacker: unknown")
REFUSED = frozenset({400, 401, 404, 405, 411, 413, 414, 421, 431, 501, 505})
"""Every HTTP status that refuses a request."""

GROWTH = 24 << 20
"""Bytes that an attacked process may grow by. (An agent grew by 1.2 MB over 10,000 requests; a leak
of 10 KB for each would be 100 MB.)"""

DEADLINE = 180.0
"""Seconds that a connection waits for an answer."""

_METHODS = (
    "GET",
    "HEAD",
    "PUT",
    "DELETE",
    "OPTIONS",
    "TRACE",
    "CONNECT",
    "PATCH",
    "post",
    "PRI",
    "POST",
    "M" * 300,
)
_TLS = bytes.fromhex("16030100f8010000f40303") + bytes(range(200))
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9)


class Attacker:
    """An endless source of bad requests, which sends its kinds by turns."""

    _kinds: list[tuple[str, Callable[[], bytes]]]

    def attempt(self, number: int) -> tuple[str, bytes]:
        """Return the kind and the bytes of one request."""
        kind, make = self._kinds[number % len(self._kinds)]
        return kind, make()


class HttpAttacker(Attacker):
    """Bad requests for one listener that speaks HTTP."""

    def __init__(
        self,
        seed: int,
        paths: Sequence[str],
        recorded: Sequence[bytes],
        fresh: Callable[[], bytes],
        method: str = "POST",
    ) -> None:
        self._random = Random(seed)
        self._paths, self._recorded, self._fresh = list(paths), list(recorded), fresh
        self._method = method
        self._kinds = [
            ("no proof", self._bare),
            ("another secret", self._guessed),
            ("replayed", self._replayed),
            ("changed", self._changed),
            ("truncated", self._truncated),
            ("spliced", self._spliced),
            ("pipelined", self._pipelined),
            ("a body from elsewhere", self._swapped),
            ("too much", self._too_much),
            ("chunked", self._chunked),
            ("twice the same header", self._doubled),
            ("header injection", self._injected),
            ("another method", self._methods),
            ("another path", self._tricks),
            ("another protocol", self._protocols),
            ("noise", self._noise),
        ]

    # --- parts of requests ------------------------------------------------------------------
    def _path(self) -> str:
        return self._random.choice(self._paths)

    def _body(self) -> bytes:
        choice = self._random.randrange(9)
        return (
            json.dumps({"op": "set", "key": MARK, "value": "AAAA", "rank": 0}).encode(),
            b"[" * self._random.randrange(1, 30_000),
            b'{"step": ' + b"9" * self._random.randrange(1, 9_000) + b"}",
            b'{"x": 1e999, "y": NaN, "z": -Infinity}',
            json.dumps({"seconds": 1, "nodes": [], "leave": True, "mark": MARK}).encode(),
            b'{"a": "\xff\xfe"}',
            b'{"a": "\\ud800"}',
            b"",
            self._random.randbytes(self._random.randrange(2_000)),
        )[choice]

    def _request(self, path: str, body: bytes, headers: dict[str, str], method: str = "") -> bytes:
        lines = [f"{method or self._method} {path} HTTP/1.1", "host: x"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if body or self._method == "POST":
            lines.append(f"content-length: {len(body)}")
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + body

    def _proof(self, path: str, body: bytes) -> dict[str, str]:
        generation = self._random.choice((0, 1, 2, -1, 10**40, self._random.getrandbits(63)))
        now = time.time() + self._random.choice((0.0, 0.0, -86400.0, 1e9))
        to = self._random.choice(("", "x" * 16, self._random.randbytes(8).hex()))
        covered = body_statement(len(body), sha256_hex(body))
        proof = sign(GUESSED, self._method, path, covered, generation, now, to)
        return request_headers(proof, body)

    # --- kinds --------------------------------------------------------------------------------
    def _bare(self) -> bytes:
        return self._request(self._path(), self._body(), {"content-type": "application/json"})

    def _guessed(self) -> bytes:
        path, body = self._path(), self._body()
        proof = self._proof(path, body)
        if self._random.random() < 0.3:  # values that are no numbers, or odd ones
            name = self._random.choice(list(proof))
            proof[name] = self._random.choice(
                ("", "nan", "inf", "1e999", "9" * 5000, "\xb2", "0x10", "-0", "1_0", " ", "null")
            )
        return self._request(path, body, proof)

    def _replayed(self) -> bytes:
        return self._random.choice(self._recorded)

    def _changed(self) -> bytes:
        """Change one thing that the proof covers in a request that never arrived."""
        head, _, body = self._fresh().partition(b"\r\n\r\n")
        if body and self._random.random() < 0.3:
            at = self._random.randrange(len(body))
            flipped = bytes([body[at] ^ 1 << self._random.randrange(8)])
            return head + b"\r\n\r\n" + body[:at] + flipped + body[at + 1 :]
        found = [
            match
            for match in re.finditer(rb"(?mi)^holdfast-([a-z]+): ([^\r\n]+)", head)
            if body or match[1] != b"body"
        ]
        chosen = self._random.choice(found)
        value = bytearray(chosen[2])
        at = self._random.randrange(len(value))
        value[at] = self._random.choice([c for c in b"0123456789abcdef" if c != value[at]])
        with suppress(ValueError):  # the same number in another form
            if chosen[1] in (b"time", b"generation") and float(value) == float(chosen[2]):
                value = bytearray(b"7")
        return head[: chosen.start(2)] + bytes(value) + head[chosen.end(2) :] + b"\r\n\r\n" + body

    def _truncated(self) -> bytes:
        data = self._fresh()
        head = len(data.partition(b"\r\n\r\n")[0])
        ends = [head, head + 1, head + 2, head + 3, head + 4, len(data) - 1]  # or anywhere
        at = self._random.choice([*ends, *(self._random.randrange(len(data)) for _ in ends)])
        return data[: min(at, len(data) - 1)]

    def _spliced(self) -> bytes:
        one, two = self._random.choice(self._recorded), self._guessed()
        at = self._random.randrange(len(one))
        return one[:at] + two[self._random.randrange(len(two)) :]

    def _pipelined(self) -> bytes:
        chosen = self._random.sample(self._recorded, min(len(self._recorded), 3))
        return b"".join([*chosen, self._guessed(), *reversed(chosen)])

    def _swapped(self) -> bytes:
        """Put another body behind the head of a request that never arrived."""
        head, _, body = self._fresh().partition(b"\r\n\r\n")
        if not body:
            return re.sub(rb"(?i)content-length: \d+\r\n", b"", head) + (
                b"\r\ncontent-length: 5\r\n\r\n12345"
            )
        other = self._random.choice((bytes(len(body)), body[::-1], b"{}" * 30, body + b" "))
        if other == body:
            other = bytes(len(body))
        length = b"content-length: %d" % len(other)
        return re.sub(rb"(?i)content-length: \d+", length, head) + b"\r\n\r\n" + other

    def _too_much(self) -> bytes:
        path = self._path()
        choice = self._random.randrange(4)
        if choice == 0:
            return f"{self._method} /{'a' * self._random.randrange(70_000)} HTTP/1.1\r\n".encode()
        if choice == 1:
            filler = {f"h{n}": "v" * self._random.randrange(300) for n in range(200)}
            return self._request(path, b"", filler)
        head = self._request(path, b"", self._proof(path, b"")).decode("latin-1")
        length = str(self._random.choice((10**7, 2**31, 2**63, 10**30, "9" * 5000, "-1", "0x5")))
        return head.replace("content-length: 0", f"content-length: {length}").encode("latin-1")

    def _chunked(self) -> bytes:
        head, _, body = self._fresh().partition(b"\r\n\r\n")
        if self._random.random() < 0.5:  # next to the length
            head += b"\r\ntransfer-encoding: chunked"
        else:
            head = re.sub(rb"(?i)content-length: \d+", b"transfer-encoding: chunked", head)
            if b"transfer-encoding" not in head:
                head += b"\r\ntransfer-encoding: chunked"
        return head + b"\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)

    def _doubled(self) -> bytes:
        head, _, body = self._fresh().partition(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        ours = [line for line in lines if line.lower().startswith(b"holdfast-")]
        lines.insert(self._random.randrange(1, len(lines)), self._random.choice(ours))
        return b"\r\n".join(lines) + b"\r\n\r\n" + body

    def _injected(self) -> bytes:
        path, body = self._path(), self._body()
        proof = self._proof(path, body)
        name = self._random.choice(list(proof))
        proof[name] += self._random.choice(
            ("\r\nx: y", "\r\n folded", "\x00", "\n\nGET / HTTP/1.1", "\xe9\xff", "\r", "\t\t")
        )
        return self._request(path, body, proof)

    def _methods(self) -> bytes:
        path, method = self._path(), self._random.choice(_METHODS)
        if method == self._method:
            method = "GET" if self._method == "POST" else "POST"
        return self._request(path, b"{}", self._proof(path, b"{}"), method)

    def _tricks(self) -> bytes:
        """Write the path in another way, under a proof that is right for the path."""
        path = self._path()
        bare, _, query = path.partition("?")
        name = bare.lstrip("/")
        other = self._random.choice(
            (
                f"//{name}",
                f"/{name}/",
                f"/./{name}",
                f"/x/../{name}",
                f"{path}?a=b",
                f"/{name};x=1",
                "/" + "".join(f"%{ord(c):02x}" for c in name),
                f"http://elsewhere/{name}",
                "*",
                "/",
                "/../../etc/passwd",
                f"/{name}%00",
                f"/{name.upper()}",
                f"/{name}#x",
                "/" + quote("é"),
                f"/{MARK}",
                "\\" + name,
                f"/{name}?{query}&{query}",
            )
        )
        if other == path:
            other = "/"
        fresh = self._fresh()
        return re.sub(rb"^([A-Z]+) \S+", rb"\1 " + other.encode().replace(b"\\", b"\\\\"), fresh)

    def _protocols(self) -> bytes:
        return self._random.choice(
            (
                _TLS,
                _PREFACE,
                b"GET /\r\n",
                b"POST /report HTTP/9.9\r\n\r\n",
                b"\r\n" * 50,
                b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
                b"\x00" * 3000,
                b"",
                b"GET / HTTP/1.1\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n",
                b"POST / HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 9\r\n\r\n",
                b'{"verb": "status", "body": "{}", "proof": [1, "n", 0, "h"]}\n',
            )
        )

    def _noise(self) -> bytes:
        return self._random.randbytes(self._random.randrange(3_000))


class LineAttacker(Attacker):
    """Bad requests for the mover's socket, which reads each request as a line of JSON."""

    def __init__(self, seed: int, recorded: bytes, fresh: Callable[[], bytes]) -> None:
        random = self._random = Random(seed)
        self._recorded, self._fresh = recorded, fresh
        self._kinds = [
            ("replayed", lambda: recorded),
            ("changed", self._changed),
            ("spliced", self._spliced),
            ("truncated", lambda: fresh()[: random.randrange(50)]),
            ("deep", lambda: b"[" * random.randrange(1, 60_000) + b"\n"),
            ("long numbers", lambda: b'{"proof": [' + b"9" * random.randrange(9_000) + b"]}\n"),
            ("noise", lambda: random.randbytes(random.randrange(3_000)) + b"\n"),
            ("HTTP", lambda: b"POST /report HTTP/1.1\r\ncontent-length: 0\r\n\r\n"),
            ("no proof", lambda: b'{"verb": "status", "body": "{}"}\n'),
        ]

    def _changed(self) -> bytes:
        value, random = json.loads(self._fresh()), self._random
        field = random.choice(("verb", "body", "proof"))
        if field == "proof":
            value["proof"][random.randrange(4)] = random.choice((3, "x", None, 1e18, [], {}, -1))
        else:
            value[field] = random.choice(("drain", "[]", "\ud800", 7, None, "x" * 9_000, MARK))
        return json.dumps(value).encode() + b"\n"

    def _spliced(self) -> bytes:
        one, two = self._recorded, self._fresh()
        return (
            one[: self._random.randrange(len(one) - 1)] + two[self._random.randrange(1, len(two)) :]
        )


# --- sending ------------------------------------------------------------------------------------
def attack(
    address: str,
    attacker: Attacker,
    count: int,
    pid: int | None,
    honest: Callable[[], object],
    allowed: frozenset[int],
    tls: Secret | None = None,
) -> Counter[tuple[str, int]]:
    """Send `count` bad requests and count the answers by kind and status (0: no answer).

    Every status must be one of `allowed`; if that is empty, no byte may come back. Every hundredth
    time, `honest` asks in between and must be served. The process `pid` must not grow. tls: speak
    TLS with this secret's certificate, as no client without the secret can.
    """
    counts = Counter[tuple[str, int]]()
    size = resident(pid) if pid else 0
    for number in range(count):
        kind, data = attacker.attempt(number)
        answer = answer_to(address, data, tls=tls)
        found = statuses(answer)
        assert set(found) <= allowed, (kind, data[:2000], answer[:500])
        assert allowed or answer == b"", (kind, data[:2000], answer[:500])
        counts.update((kind, status) for status in found or [0])
        if number % 100 == 0:
            honest()
        if pid and number == 300:  # by now the first refusals have loaded what they need
            size = resident(pid)
    honest()
    assert pid is None or resident(pid) - size < GROWTH
    return counts


def connect(address: str, tls: Secret | None = None) -> socket.socket:
    """Connect to host:port, or to the path of a unix socket."""
    if not address.startswith("/"):
        made = socket.create_connection(place(address), DEADLINE)
        context = None if tls is None else tls.client_tls
        return made if context is None else context.wrap_socket(made)
    made = socket.socket(socket.AF_UNIX)
    made.settimeout(DEADLINE)
    made.connect(address)
    return made


def place(address: str) -> tuple[str, int]:
    host, port = address.rsplit(":", 1)
    return host, int(port)


def answer_to(address: str, data: bytes, most: int = 1 << 20, tls: Secret | None = None) -> bytes:
    """Send bytes, end this side of the connection, and return what comes back."""
    found = b""
    with connect(address, tls) as connection:
        with suppress(OSError):  # refused and closed before all bytes had left
            connection.sendall(data)
            socket.socket.shutdown(connection, socket.SHUT_WR)
        with suppress(ConnectionResetError, ssl.SSLError):  # cut, or an alert and cut
            while len(found) < most and (more := connection.recv(65536)):
                found += more
    return found


def statuses(answer: bytes) -> list[int]:
    """Return the status of each answer among the bytes, without interim "100 Continue"."""
    found = [int(code) for code in re.findall(rb"HTTP/1\.[01] (\d{3})", answer)]
    return [code for code in found if code != 100]


def resident(pid: int) -> int:
    """Return the bytes of memory that a process occupies."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


# --- intercepting -------------------------------------------------------------------------------
class Tap:
    """A man in the middle: records the requests, and may change the answers."""

    def __init__(
        self,
        address: str,
        change: Callable[[bytes], bytes] = lambda data: data,
        tls: Secret | None = None,
    ) -> None:
        """tls: the certificate that it has, as only a holder of the secret can."""
        self._there, self.change, self._tls = address, change, tls
        self.requests: list[bytes] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                here, _ = self._server.accept()
                threading.Thread(target=self._carry, args=(here,), daemon=True).start()

    def _carry(self, here: socket.socket) -> None:
        context = None if self._tls is None else listener_context(self._tls)
        if context is not None:
            here = context.wrap_socket(here, server_side=True)
        with here, connect(self._there, self._tls) as there, suppress(OSError):
            while (request := message(here)) is not None:
                self.requests.append(request)
                there.sendall(request)
                answer = message(there)
                if answer is None:
                    return
                changed = self.change(answer)
                here.sendall(changed)
                if changed != answer:
                    return  # the client would wait for the rest in vain


def message(connection: socket.socket) -> bytes | None:
    """Read one request or answer of HTTP with its body; None at the end."""
    data = b""
    while b"\r\n\r\n" not in data:
        more = connection.recv(65536)
        if not more:
            return None
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: (\d+)", head)
    due = int(length[1]) if length else 0
    while len(body) < due and (more := connection.recv(65536)):
        body += more
    return head + b"\r\n\r\n" + body


@contextmanager
def tapped(
    address: str, change: Callable[[bytes], bytes] = lambda data: data, tls: Secret | None = None
) -> Iterator[Tap]:
    tap = Tap(address, change, tls)
    try:
        yield tap
    finally:
        tap.close()


def signing(
    address: str,
    secret: Secret,
    generation: int,
    requests: list[tuple[str, str, bytes]],
    aim: ListenerIdentity,
) -> Callable[[], bytes]:
    """Return a source of rightly signed requests; they are intercepted, so they never arrive."""
    number = iter(range(10**9))

    def fresh() -> bytes:
        method, path, body = requests[next(number) % len(requests)]
        headers = request_headers(aim.sign(secret, method, path, body, generation), body)
        found = [f"{method} {path} HTTP/1.1", f"host: {address}"]
        found += [f"{name}: {value}" for name, value in headers.items()]
        if body:
            found.append(f"content-length: {len(body)}")
        return "\r\n".join([*found, "", ""]).encode() + body

    return fresh
