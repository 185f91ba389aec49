"""Client and server as they meet: over a real socket, with strangers at the same port. One
connection to a listener: in what order it answers, and what ends it."""

from __future__ import annotations

import asyncio
import json
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from holdfast.errors import FencedError, HoldfastError
from holdfast.wire.http import connection
from holdfast.wire.http.async_client import AsyncClient
from holdfast.wire.http.auth import (
    AuthError,
    Verifier,
    body_statement,
    request_headers,
    sha256_hex,
    sign,
)
from holdfast.wire.http.client import Client, RequestError, UnreachableError
from holdfast.wire.http.connection import MAX_HEAD_BYTES, BodyHandler, HttpResponse, RequestHead
from holdfast.wire.http.connection_limits import ConnectionLimiter
from holdfast.wire.http.refusals import CONTROL, Refusals
from holdfast.wire.http.server import Handler, SignedApplication
from holdfast.wire.http.sockets import AddressError, address_of, bind_listener
from holdfast.wire.secret import Secret
from tests.support.attacker import DEADLINE, answer_to, place
from tests.support.listener import listening

SECRET = Secret(b"s" * 32)
NAME = "the listener"


class Service:
    """What a listener serves. `calls` are the bodies that reached a handler."""

    def __init__(self, handlers: Mapping[str, Handler] | None) -> None:
        self._more = handlers or {}
        self.calls: list[dict[str, Any]] = []
        self.newest = 2
        self.address = ""

    def make(self) -> SignedApplication:
        return SignedApplication(
            {"/echo": self._echo, "/who": self._echo, "/bug": self._bug, **self._more},
            SECRET,
            Verifier(SECRET, time.time, name=NAME),
            lambda: self.newest,
            generationless_paths=frozenset({"/who", *self._more}),
            max_body_bytes=10_000,
        )

    async def _echo(self, generation: int, body: dict[str, Any]) -> dict[str, Any]:
        self.calls.append(body)
        return {"generation": generation, "got": body["x"]}

    async def _bug(self, generation: int, body: dict[str, Any]) -> dict[str, Any]:
        raise RuntimeError("broken on purpose")


@contextmanager
def serving(handlers: Mapping[str, Handler] | None = None, port: int = 0) -> Iterator[Service]:
    service = Service(handlers)
    with listening(service.make, port) as service.address:
        yield service


def _status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def _post(path: str, body: bytes, headers: dict[str, str]) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: x", f"content-length: {len(body)}"]
    lines += [f"{key}: {value}" for key, value in headers.items()]
    lines.append("connection: close")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def _signed(
    path: str,
    body: bytes,
    generation: int = 2,
    secret: Secret = SECRET,
    to: str = NAME,
    ahead: float = 0.0,
) -> dict[str, str]:
    covered = body_statement(len(body), sha256_hex(body))
    proof = sign(secret, "POST", path, covered, generation, time.time() + ahead, to)
    return request_headers(proof, body)


def test_requests_from_many_threads_on_few_connections() -> None:
    with serving() as service:
        client = Client(service.address, SECRET, 2)
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda n: client.post("/echo", {"x": n}), range(200)))
        assert [a["got"] for a in answers] == list(range(200))
        assert len(client._connections._idle_since) <= 8
        client.close()


def test_without_a_valid_proof_nothing_happens() -> None:
    body = json.dumps({"x": 1}).encode()
    right = _signed("/echo", body)
    other = _signed("/echo", body, secret=Secret(b"o" * 32))
    with serving() as service:
        attempts = {
            "none": _post("/echo", body, {}),
            "another secret": _post("/echo", body, other),
            "no digest": _post("/echo", body, right | {"holdfast-hmac": ""}),
            "another path": _post("/who", body, right),
            "another body": _post("/echo", body.replace(b"1", b"2"), _signed("/echo", body)),
            "a longer body": _post("/echo", body + b" ", right),
            "another generation": _post("/echo", body, right | {"holdfast-generation": "3"}),
        }
        for name, request in attempts.items():
            assert _status(answer_to(service.address, request)) == 401, name
        assert service.calls == []
        assert _status(answer_to(service.address, _post("/echo", body, right))) == 200
        assert _status(answer_to(service.address, _post("/echo", body, right))) == 401  # a replay
        assert service.calls == [{"x": 1}]
        with pytest.raises(AuthError):
            Client(service.address, Secret(b"o" * 32), 2).post("/echo", {"x": 1})
        assert len(service.calls) == 1


def test_generations_are_fenced() -> None:
    with serving() as service:
        with pytest.raises(FencedError, match="2 rules"):
            Client(service.address, SECRET, 1).post("/echo", {"x": 1})
        with pytest.raises(RequestError, match="has not been opened"):
            Client(service.address, SECRET, 3).post("/echo", {"x": 1})
        with pytest.raises(FencedError):
            Client(service.address, SECRET).post("/echo", {"x": 1})
        assert service.calls == []
        assert Client(service.address, SECRET).post("/who", {"x": 1})["generation"] == 0
        client = Client(service.address, SECRET, 2)
        assert client.post("/echo", {"x": 1})["got"] == 1
        service.newest = 3
        with pytest.raises(FencedError):
            client.post("/echo", {"x": 1})


def test_another_method_or_path_is_refused() -> None:
    with serving() as service:
        assert _status(answer_to(service.address, b"GET /echo HTTP/1.0\r\n\r\n")) == 405
        assert _status(answer_to(service.address, _post("/nowhere", b"", {}))) == 404


def test_a_body_above_the_limit_is_refused_unread() -> None:
    with serving() as service:
        body = b"x" * 20_000
        answer = answer_to(service.address, _post("/echo", body, _signed("/echo", body)))
        assert _status(answer) == 413
        head = _post("/echo", body, _signed("/echo", body))[: -len(body)]
        with socket.create_connection(place(service.address), timeout=10) as connection:
            connection.sendall(head)  # answered while no byte of the body has come
            assert _status(connection.recv(65536)) == 413
        with pytest.raises(RequestError, match="too long"):
            Client(service.address, SECRET, 2).post("/echo", {"x": "y" * 20_000})
        assert service.calls == []


def test_a_request_for_another_listener_is_told_whom_to_sign_for() -> None:
    """Recorded on its way to another agent, or to the process that had the port before: no effect.
    A client learns the name once, and the clock with it."""
    body = json.dumps({"x": 1}).encode()
    with serving() as service:
        for wrong in ({"to": "another"}, {"to": ""}, {"ahead": -500.0}, {"ahead": 500.0}):
            request = _post("/echo", body, _signed("/echo", body, **wrong))  # type: ignore[arg-type]
            answer = answer_to(service.address, request)
            assert _status(answer) == 421, wrong
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["to"] == NAME
        assert service.calls == []
        client = Client(service.address, SECRET, 2)
        # a machine whose clock is hours behind
        client._listener._clock = lambda: time.time() - 7200.0
        assert [client.post("/echo", {"x": n})["got"] for n in (3, 4)] == [3, 4]
        assert service.calls == [{"x": 3}, {"x": 4}]
        client.close()


def test_a_body_is_not_read_of_whoever_proves_nothing() -> None:
    with serving() as service, socket.create_connection(place(service.address), 10) as stranger:
        stranger.sendall(b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 9000\r\n\r\n")
        assert _status(stranger.recv(65536)) == 401
        assert stranger.recv(1) == b""


def test_what_makes_no_sense_is_refused_with_its_reason() -> None:
    with serving() as service:
        client = Client(service.address, SECRET, 2)
        with pytest.raises(RequestError, match="KeyError: 'x'"):
            client.post("/echo", {})
        with pytest.raises(RequestError, match="broken on purpose") as caught:
            client.post("/bug", {})
        assert caught.value.status == 500
        assert client.post("/echo", {"x": 1})["got"] == 1


def test_a_refused_connection_is_tried_again_until_the_deadline() -> None:
    bound = bind_listener("127.0.0.1", 0, "cluster.interface")
    address = address_of(bound)
    bound.close()
    with pytest.raises(UnreachableError, match="nobody answers"):
        Client(address, SECRET, 2, connect_retry_s=0.05).post("/echo", {"x": 1})
    client = Client(address, SECRET, 2, connect_retry_s=20.0)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.post, "/echo", {"x": 5})
        with serving(port=int(address.split(":")[1])):
            assert answer.result(120)["got"] == 5


def test_silence_is_bounded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        client = Client(f"127.0.0.1:{deaf.getsockname()[1]}", SECRET, 2)
        with pytest.raises(UnreachableError, match=r"within 0\.2 s"):
            client.post("/echo", {"x": 1}, timeout=0.2)


def test_an_impostor_at_the_port_is_recognised() -> None:
    """Somebody else's server answers 200 with JSON, but cannot sign for the secret."""
    content = b'{"got": 1}'
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\nholdfast-hmac: " + b"0" * 64
    with socket.create_server(("127.0.0.1", 0)) as impostor:

        def answer() -> None:
            connection, _ = impostor.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(head + b"\r\n\r\n" + content)
                connection.recv(65536)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        client = Client(f"127.0.0.1:{impostor.getsockname()[1]}", SECRET, 2)
        with pytest.raises(AuthError, match="this run's agent"):
            client.post("/echo", {"x": 1})
        client.close()
        thread.join(120)


def test_an_address_that_is_not_ours() -> None:
    with pytest.raises(AddressError, match=r"cluster\.interface.*192\.0\.2\.1") as caught:
        bind_listener("192.0.2.1", 0, "cluster.interface")
    assert caught.value.exit_code == 2
    with bind_listener("127.0.0.1", 0, "k") as taken, pytest.raises(AddressError):
        bind_listener("127.0.0.1", taken.getsockname()[1], "k")


@pytest.mark.parametrize(
    ("length", "said"),
    [(b"", "how long it is"), (b"content-length: 1000000000000\r\n", "too long")],
)
def test_an_endless_answer_does_not_fill_the_memory(length: bytes, said: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def flood() -> None:
            with suppress(OSError):
                connection, _ = server.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(b"HTTP/1.1 200 OK\r\n%b\r\n" % length)
                    while select.select([], [connection], [], DEADLINE)[1]:
                        connection.sendall(bytes(1 << 20))

        thread = threading.Thread(target=flood, daemon=True)
        thread.start()
        client = Client(f"127.0.0.1:{server.getsockname()[1]}", Secret(b"c" * 32), 1)
        with pytest.raises(HoldfastError, match=said):
            client.post("/term", {})
        thread.join(DEADLINE)


def test_requests_of_an_event_loop_wait_for_no_other_and_reuse_their_connections() -> None:
    arrived = []

    async def wait_for_two(generation: int, body: dict[str, Any]) -> dict[str, Any]:
        arrived.append(body["x"])
        while len(arrived) < 2:
            await asyncio.sleep(0.001)
        return {"got": body["x"]}

    async def ask(address: str) -> None:
        client = AsyncClient(address, SECRET)
        answers = await asyncio.gather(*(client.post("/wait", {"x": n}) for n in range(2)))
        assert [answer["got"] for answer in answers] == [0, 1]
        kept = set(client._idle_connections)
        assert len(kept) == 2
        assert (await client.post("/wait", {"x": 3}))["got"] == 3
        assert set(client._idle_connections) == kept
        for idle in kept:  # as a listener does after an hour
            idle._transport.abort()
        assert (await client.post("/wait", {"x": 4}))["got"] == 4
        assert not kept & set(client._idle_connections)
        client.close()

    with serving({"/wait": wait_for_two}) as service:
        asyncio.run(ask(service.address))


class Echo:
    """Answers /at-once by the head alone; of all else, the body. A body "wait" is answered when
    another says "go"."""

    def __init__(self, refusals: Refusals) -> None:
        self.limiter = ConnectionLimiter(CONTROL, refusals)
        self.tls: ssl.SSLContext | None = None
        self.go = asyncio.Event()

    def admit(self, head: RequestHead) -> HttpResponse | BodyHandler:
        if head.target == b"/at-once":
            return HttpResponse(200, b"at once")
        return self._read

    async def _read(self, body: bytes) -> HttpResponse:
        if body == b"wait":
            await self.go.wait()
        if body == b"go":
            self.go.set()
        return HttpResponse(200, body)


@contextmanager
def echoing() -> Iterator[tuple[tuple[str, int], Refusals]]:
    refusals = Refusals()
    with listening(lambda: Echo(refusals)) as address:
        yield place(address), refusals


def _raw_post(body: bytes, more: bytes = b"") -> bytes:
    return b"POST / HTTP/1.1\r\n%bcontent-length: %d\r\n\r\n%b" % (more, len(body), body)


def _rest(asks: socket.socket) -> bytes:
    """All that comes until the other end closes."""
    found = b""
    asks.settimeout(60)
    try:
        while more := asks.recv(65536):
            found += more
    except ConnectionResetError:
        pass
    return found


def _bodies(answers: bytes) -> list[bytes]:
    return [part.partition(b"\r\n\r\n")[2] for part in answers.split(b"HTTP/1.1 200 OK\r\n")[1:]]


def test_requests_sent_together_are_answered_in_their_order() -> None:
    at_once = b"GET /at-once HTTP/1.1\r\n\r\n"
    with echoing() as (at, _), socket.create_connection(at) as asks:
        asks.sendall(
            _raw_post(b"wait") + at_once + b"".join(_raw_post(b"%d" % n) for n in range(40))
        )
        with socket.create_connection(at) as other:
            other.sendall(_raw_post(b"go", b"connection: close\r\n"))
            assert _bodies(_rest(other)) == [b"go"]
        asks.shutdown(socket.SHUT_WR)
        assert _bodies(_rest(asks)) == [b"wait", b"at once", *(b"%d" % n for n in range(40))]


def test_whoever_says_nothing_more_still_gets_its_answer() -> None:
    with echoing() as (at, _), socket.create_connection(at) as asks:
        asks.sendall(_raw_post(b"wait"))
        asks.shutdown(socket.SHUT_WR)
        with socket.create_connection(at) as other:
            other.sendall(_raw_post(b"go"))
            assert _bodies(_rest(asks)) == [b"wait"]


def test_a_body_in_pieces() -> None:
    with echoing() as (at, _), socket.create_connection(at) as asks:
        whole = _raw_post(b"abc" * 9, b"connection: close\r\n")
        for n in range(len(whole)):
            asks.sendall(whole[n : n + 1])
        assert _bodies(_rest(asks)) == [b"abc" * 9]


@pytest.mark.parametrize("piece", [MAX_HEAD_BYTES * 2, 1000])
@pytest.mark.parametrize(
    "headers", [b"x: " + b"x" * 2 * MAX_HEAD_BYTES, b"x: y\r\n" * MAX_HEAD_BYTES]
)
def test_a_head_that_is_too_long(piece: int, headers: bytes) -> None:
    """In one piece, or in many: it is refused before its end. Many short headers count together."""
    head = b"POST / HTTP/1.1\r\n" + headers
    with echoing() as (at, refusals), socket.create_connection(at) as asks:
        try:
            for n in range(0, len(head), piece):
                asks.sendall(head[n : n + piece])
        except (BrokenPipeError, ConnectionResetError):
            pass
        assert _rest(asks)[:12] in (b"", b"HTTP/1.1 400")
        assert refusals.totals() == {"control": {"not ours": 1}}


def test_a_body_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "BODY_TIMEOUT_S", 0.05)
    with echoing() as (at, refusals), socket.create_connection(at) as asks:
        asks.sendall(_raw_post(b"x" * 100)[:-1])
        assert _rest(asks).startswith(b"HTTP/1.1 400")
        assert refusals.totals() == {"control": {"slow": 1}}


@pytest.mark.parametrize("more", [b"connection: upgrade\r\nupgrade: websocket\r\n", b""])
def test_what_is_to_become_another_protocol(more: bytes) -> None:
    request = _raw_post(b"", more) if more else b"CONNECT x:1 HTTP/1.1\r\n\r\n"
    with echoing() as (at, refusals), socket.create_connection(at) as asks:
        asks.sendall(request + b"\x00" * 100)
        _rest(asks)
        assert refusals.totals() == {"control": {"not ours": 1}}
