"""Requests of an attacker: seeded, endless, and made of recorded network traffic.

The attacker has no secret. The attacker knows the program, its paths and the form of its requests.
Some conversations were recorded (`recorded`: requests that were answered). Some requests were
withheld (`fresh`: they have never arrived, and the attacker changes parts that a proof covers).
"""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from random import Random
from urllib.parse import quote

from holdfast.wire.http.auth import headers_of, sha256, sign, stated
from holdfast.wire.secret import Secret

MARK = "left-by-a-stranger"
"""A mark in all that the attacker sends: it may be found nowhere."""

_METHODS = ("GET", "HEAD", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PATCH", "post", "PRI",
            "POST", "M" * 300)  # fmt: skip
_TLS = bytes.fromhex("16030100f8010000f40303") + bytes(range(200))
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9)


class Stranger:
    """Requests for one listener that speaks HTTP."""

    def __init__(
        self, seed: int, paths: Sequence[str], recorded: Sequence[bytes],
        fresh: Callable[[], bytes], method: str = "POST",
    ) -> None:  # fmt: skip
        self._random = Random(seed)
        self._paths, self._recorded, self._fresh = list(paths), list(recorded), fresh
        self._method = method
        self._secret = Secret(b"guessed by a stranger, not known")
        self._kinds: list[tuple[str, Callable[[], bytes]]] = [
            ("no proof", self._bare), ("another secret", self._guessed),
            ("replayed", self._replayed), ("changed", self._changed),
            ("truncated", self._truncated), ("spliced", self._spliced),
            ("pipelined", self._pipelined), ("a body from elsewhere", self._swapped),
            ("too much", self._too_much), ("chunked", self._chunked),
            ("twice the same header", self._doubled), ("header injection", self._injected),
            ("another method", self._methods), ("another path", self._tricks),
            ("another protocol", self._protocols), ("noise", self._noise),
        ]  # fmt: skip

    def attempts(self, count: int) -> Iterator[tuple[str, bytes]]:
        for number in range(count):
            name, make = self._kinds[number % len(self._kinds)]
            yield name, make()

    # --- parts --------------------------------------------------------------------------------
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
            b'{"a": "\xff\xfe"}', b'{"a": "\\ud800"}', b"",
            self._random.randbytes(self._random.randrange(2_000)),
        )[choice]  # fmt: skip

    def _request(self, path: str, body: bytes, headers: dict[str, str], method: str = "") -> bytes:
        lines = [f"{method or self._method} {path} HTTP/1.1", "host: x"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if body or self._method == "POST":
            lines.append(f"content-length: {len(body)}")
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + body

    def _proof(self, path: str, body: bytes, secret: Secret | None = None) -> dict[str, str]:
        generation = self._random.choice((0, 1, 2, -1, 10**40, self._random.getrandbits(63)))
        now = time.time() + self._random.choice((0.0, 0.0, -86400.0, 1e9))
        to = self._random.choice(("", "x" * 16, self._random.randbytes(8).hex()))
        covered = stated(len(body), sha256(body))
        proof = sign(secret or self._secret, self._method, path, covered, generation, now, to)
        return headers_of(proof, body)

    # --- kinds --------------------------------------------------------------------------------
    def _bare(self) -> bytes:
        return self._request(self._path(), self._body(), {"content-type": "application/json"})

    def _guessed(self) -> bytes:
        path, body = self._path(), self._body()
        proof = self._proof(path, body)
        if self._random.random() < 0.3:  # numbers that no number can be made of, and the like
            name = self._random.choice(list(proof))
            proof[name] = self._random.choice(
                ("", "nan", "inf", "1e999", "9" * 5000, "\xb2", "0x10", "-0", "1_0", " ", "null")
            )
        return self._request(path, body, proof)

    def _replayed(self) -> bytes:
        return self._random.choice(self._recorded)

    def _changed(self) -> bytes:
        """A request that never arrived, with one thing changed that its proof covers."""
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
        with suppress(ValueError):  # another way to write the same number
            if chosen[1] in (b"time", b"generation") and float(value) == float(chosen[2]):
                value = bytearray(b"7")
        return head[: chosen.start(2)] + bytes(value) + head[chosen.end(2) :] + b"\r\n\r\n" + body

    def _truncated(self) -> bytes:
        data = self._fresh()
        head = len(data.partition(b"\r\n\r\n")[0])
        ends = [head, head + 1, head + 2, head + 3, head + 4, len(data) - 1]  # and anywhere else
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
        """The head of one that never arrived, another body of the same length or another one."""
        head, _, body = self._fresh().partition(b"\r\n\r\n")
        if not body:
            return re.sub(rb"(?i)content-length: \d+\r\n", b"", head) + (
                b"\r\ncontent-length: 5\r\n\r\n12345")  # fmt: skip
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
        if self._random.random() < 0.5:  # in addition to the length, which stays
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
        """The same place, written in another way: each has a proof that would be good for it."""
        path = self._path()
        bare, _, query = path.partition("?")
        name = bare.lstrip("/")
        other = self._random.choice((
            f"//{name}", f"/{name}/", f"/./{name}", f"/x/../{name}", f"{path}?a=b", f"/{name};x=1",
            "/" + "".join(f"%{ord(c):02x}" for c in name), f"http://elsewhere/{name}", "*", "/",
            "/../../etc/passwd", f"/{name}%00", f"/{name.upper()}", f"/{name}#x", "/" + quote("é"),
            f"/{MARK}", "\\" + name, f"/{name}?{query}&{query}",
        ))  # fmt: skip
        if other == path:
            other = "/"
        fresh = self._fresh()
        return re.sub(rb"^([A-Z]+) \S+", rb"\1 " + other.encode().replace(b"\\", b"\\\\"), fresh)

    def _protocols(self) -> bytes:
        return self._random.choice((
            _TLS, _PREFACE, b"GET /\r\n", b"POST /report HTTP/9.9\r\n\r\n", b"\r\n" * 50,
            b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", b"\x00" * 3000, b"",
            b"GET / HTTP/1.1\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n",
            b"POST / HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 9\r\n\r\n",
            b'{"verb": "status", "body": "{}", "proof": [1, "n", 0, "h"]}\n',
        ))  # fmt: skip

    def _noise(self) -> bytes:
        return self._random.randbytes(self._random.randrange(3_000))


def lines(seed: int, count: int, recorded: Sequence[bytes], fresh: Callable[[], bytes]
          ) -> Iterator[tuple[str, bytes]]:  # fmt: skip
    """The same for the mover's socket, where a request is a line of JSON."""
    random = Random(seed)

    def changed() -> bytes:
        value = json.loads(fresh())
        field = random.choice(("verb", "body", "proof"))
        if field == "proof":
            value["proof"][random.randrange(4)] = random.choice((3, "x", None, 1e18, [], {}, -1))
        else:
            value[field] = random.choice(("drain", "[]", "\ud800", 7, None, "x" * 9_000, MARK))
        return json.dumps(value).encode() + b"\n"

    def spliced() -> bytes:
        one, two = random.choice(recorded), fresh()
        return one[: random.randrange(len(one) - 1)] + two[random.randrange(1, len(two)) :]

    kinds: list[tuple[str, Callable[[], bytes]]] = [
        ("replayed", lambda: random.choice(recorded)), ("changed", changed),
        ("spliced", spliced), ("truncated", lambda: fresh()[: random.randrange(50)]),
        ("deep", lambda: b"[" * random.randrange(1, 60_000) + b"\n"),
        ("long numbers", lambda: b'{"proof": [' + b"9" * random.randrange(9_000) + b"]}\n"),
        ("noise", lambda: random.randbytes(random.randrange(3_000)) + b"\n"),
        ("HTTP", lambda: b"POST /report HTTP/1.1\r\ncontent-length: 0\r\n\r\n"),
        ("no proof", lambda: b'{"verb": "status", "body": "{}"}\n'),
    ]  # fmt: skip
    for number in range(count):
        name, make = kinds[number % len(kinds)]
        yield name, make()


def told(connect: Callable[[], socket.socket], data: bytes, most: int = 1 << 20) -> bytes:
    """Send bytes, close this end for writing, and return the answer until the other end closes."""
    found = b""
    with connect() as connection:
        connection.settimeout(60)
        with suppress(OSError):  # refused, and closed, before all had left
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
        with suppress(ConnectionResetError):
            while len(found) < most and (more := connection.recv(65536)):
                found += more
    return found


def statuses(answer: bytes) -> list[int]:
    """The status of each answer among the bytes; an interim "100 Continue" is none."""
    found = [int(code) for code in re.findall(rb"HTTP/1\.[01] (\d{3})", answer)]
    return [code for code in found if code != 100]
