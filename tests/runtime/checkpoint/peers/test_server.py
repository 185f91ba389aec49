"""Clients that a mover's listener accepts, and what strangers cannot do to it."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import pytest

from holdfast.checkpoint.memory.snapshot_store import SnapshotStore
from holdfast.checkpoint.peers.client import INVENTORY_PATH, OFFER_PATH, PeerClient, PeerError
from holdfast.checkpoint.peers.rate_limiter import TokenBucket
from holdfast.checkpoint.peers.receiver import SnapshotReceiver
from holdfast.checkpoint.peers.server import MAX_BODY_BYTES, PeerServer
from holdfast.checkpoint.peers.source import PeerSource
from holdfast.core.format.manifest import PartManifest, blob_key, commit_key, writer_name
from holdfast.errors import FencedError
from holdfast.wire.http.auth import AuthError, body_statement, request_headers, sha256_hex, sign
from holdfast.wire.http.sync_connection import MAX_HEAD_BYTES
from holdfast.wire.secret import Secret
from holdfast.wire.store.run_store import MissingKeyError
from tests.support.peer_nodes import SECRET, Node, offer_of, topology
from tests.support.ranks import wait_until

STRANGER = Secret(b"x" * 32)


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[Node, Node]]:
    """One that holds step 3 of generation 2 itself, and one that keeps what it is offered."""
    owner, keeper = Node(every_steps=1000), Node()
    owner.begin(topology(2))
    owner.put(3)
    yield owner, keeper
    owner.close()
    keeper.close()


@pytest.fixture
def offer(nodes: tuple[Node, Node]) -> dict[str, Any]:
    owner = nodes[0]
    source = PeerSource("owner", owner.address, SECRET, 2)
    return offer_of(source.inventory()[0].sealed_manifest, owner.address, topology(2))


@contextmanager
def listening(**settings: Any) -> Iterator[tuple[PeerServer, str]]:
    """A listener of this process, and its address."""
    shelf = SnapshotStore()
    server = PeerServer(
        socket.create_server(("127.0.0.1", 0)),
        SECRET,
        shelf,
        SnapshotReceiver(shelf, SECRET, 0),
        TokenBucket(0, time.monotonic, lambda seconds: False),
        None,
        **settings,
    )
    server.start()
    try:
        yield server, server.address
    finally:
        server.close()


def idle_socket(client: PeerClient) -> socket.socket:
    """Of the client's only connection."""
    (connection,) = client._connections._idle_since
    return connection.sock


def connect(node: Node) -> socket.socket:
    host, _, port = node.address.rpartition(":")
    return socket.create_connection((host, int(port)), 10)


def answer(node: Node, raw: bytes) -> bytes:
    """What comes back for raw bytes, until the other end closes or says no more."""
    with closing(connect(node)) as connection:
        connection.sendall(raw)
        connection.settimeout(2)
        found = b""
        try:
            while data := connection.recv(65536):
                found += data
        except TimeoutError:
            pass
        return found


def request(
    node: Node, method: str, path: str, body: bytes, generation: int, secret: Secret = SECRET
) -> bytes:
    client = PeerClient(node.address, SECRET, 0)
    client.newest_generation()  # learns the listener's name
    to = client.listener_identity._known[0]
    client.close()
    covered = body_statement(len(body), sha256_hex(body))
    proof = sign(secret, method, path, covered, generation, time.time(), to)
    lines = [f"{method} {path} HTTP/1.1", "host: x", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in request_headers(proof, body).items()]
    return "\r\n".join([*lines, "connection: close", "", ""]).encode() + body


def test_a_wrong_secret_gets_nothing_and_changes_nothing(
    nodes: tuple[Node, Node], offer: dict[str, Any]
) -> None:
    owner, keeper = nodes
    for ask in (
        lambda: PeerClient(owner.address, STRANGER, 2).inventory(),
        lambda: PeerClient(keeper.address, STRANGER, 9).post(OFFER_PATH, offer),
        lambda: PeerClient(owner.address, STRANGER, 2).read_into(
            blob_key(2, 3, writer_name(0)), 0, memoryview(bytearray(10))
        ),
    ):
        with pytest.raises(AuthError, match="does not accept this run's secret"):
            ask()
    assert keeper.has() == []
    assert keeper.do("status")["generation"] < 9  # a stranger cannot fence any node


@contextmanager
def impostor(answer: bytes) -> Iterator[PeerClient]:
    """A client of a port that another program has, which answers so."""
    with closing(socket.create_server(("127.0.0.1", 0))) as fake:
        client = PeerClient(f"127.0.0.1:{fake.getsockname()[1]}", SECRET, 1, silence_timeout_s=5)

        def serve() -> None:
            connection, _ = fake.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)
                connection.recv(1)  # the client goes without waiting for more

        thread = threading.Thread(target=serve)
        thread.start()
        yield client
        client.close()
        thread.join(120)


def test_an_answer_that_is_not_signed_by_us_is_refused(nodes: tuple[Node, Node]) -> None:
    """Another run's mover has the port, with another secret."""
    with closing(Node(secret=STRANGER)) as other:
        raw = answer(other, request(nodes[0], "GET", INVENTORY_PATH, b"", 1, STRANGER))
    with impostor(raw) as client, pytest.raises(AuthError, match="does not come from this run"):
        client.inventory()


@pytest.mark.parametrize("status", [200, 400, 421])
def test_a_strangers_long_answer_is_not_read(status: int) -> None:
    """A client cannot know the port's owner before it has the complete answer."""
    raw = f"HTTP/1.1 {status} X\r\ncontent-length: {64 << 20}\r\n\r\n".encode()
    with impostor(raw) as client, pytest.raises(PeerError, match="the answer is too long"):
        client.newest_generation()


def test_a_replayed_offer_is_refused(nodes: tuple[Node, Node], offer: dict[str, Any]) -> None:
    """Also with another path or another body under the same proof."""
    keeper = nodes[1]
    body = json.dumps({**offer, "ranks": [7]}).encode()  # refused, for it lacks the part's rank
    raw = request(keeper, "POST", OFFER_PATH, body, 2)
    assert b" 400 " in answer(keeper, raw).splitlines()[0]
    assert b" 401 " in answer(keeper, raw).splitlines()[0]
    right = json.dumps(offer).encode()
    signed = request(keeper, "POST", OFFER_PATH, body, 2)
    swapped = signed.replace(body, right).replace(
        f"content-length: {len(body)}".encode(), f"content-length: {len(right)}".encode()
    )
    assert b" 401 " in answer(keeper, swapped).splitlines()[0]
    # Of the same length, with the digest that was signed: found out when the body is there.
    other = body.replace(b"[7]", b"[6]")
    assert b" 401 " in answer(
        keeper, request(keeper, "POST", OFFER_PATH, body, 2)[: -len(body)] + other
    )
    # With the digest of the other body, in the head.
    forged = request(keeper, "POST", OFFER_PATH, body, 2).replace(body, other)
    forged = forged.replace(sha256_hex(body).encode(), sha256_hex(other).encode())
    assert b" 401 " in answer(keeper, forged).splitlines()[0]
    assert keeper.has() == []


def test_a_strangers_body_is_not_read(nodes: tuple[Node, Node]) -> None:
    """The head alone shows that the proof is wrong. It is answered, and the connection closed,
    before a byte of a body of 60 MB has come."""
    body = bytes(60 << 20)
    for secret, words in ((STRANGER, b" 401 "), (SECRET, b"")):
        raw = request(nodes[1], "POST", OFFER_PATH, body, 2, secret)
        head = raw[: -len(body)]
        with closing(connect(nodes[1])) as connection:
            connection.sendall(head)
            connection.settimeout(0.5 if not words else 60)
            if words:
                found = b"".join(iter(lambda c=connection: c.recv(65536), b""))
                assert words in found.splitlines()[0]
            else:  # who knows the secret is waited for
                with pytest.raises(TimeoutError):
                    connection.recv(1)
    with pytest.raises(AuthError, match="does not accept this run's secret"):
        PeerClient(nodes[1].address, STRANGER, 2).post(OFFER_PATH, {"part": "x" * (8 << 20)})


def test_a_connection_that_was_idle_for_long_is_not_used_again() -> None:
    with listening() as (_, address):
        client = PeerClient(address, SECRET, 1)
        ends = []
        for kept in (50.0, 50.0, 0.0):
            client._connections._idle_limit_s = kept
            client.newest_generation()
            ends.append(idle_socket(client).getsockname())
    assert ends[0] == ends[1] != ends[2]


def test_too_long_a_body_is_refused_unread(nodes: tuple[Node, Node]) -> None:
    length = f"content-length: {MAX_BODY_BYTES + 1}"
    head = f"POST {OFFER_PATH} HTTP/1.1\r\nhost: x\r\n{length}\r\n\r\n".encode()
    assert b" 413 " in answer(nodes[1], head).splitlines()[0]
    chunked = (
        f"POST {OFFER_PATH} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    )
    assert b" 413 " in answer(nodes[1], chunked).splitlines()[0]


def test_an_older_generation_is_fenced(nodes: tuple[Node, Node], offer: dict[str, Any]) -> None:
    """Once a newer one has asked, what the older one still offers is refused."""
    owner, keeper = nodes
    PeerClient(keeper.address, SECRET, 5).inventory()
    with pytest.raises(FencedError, match="generation 2 is over: 5 rules"):
        PeerClient(keeper.address, SECRET, 2).post(OFFER_PATH, offer)
    with pytest.raises(FencedError):
        PeerClient(keeper.address, SECRET, 4).inventory()
    with pytest.raises(FencedError, match="generation 5 offers a part of 2"):
        PeerClient(keeper.address, SECRET, 5).post(OFFER_PATH, offer)
    assert keeper.has() == []
    assert owner.has() == [(2, 3, 0)]


def test_offers_that_make_no_sense(nodes: tuple[Node, Node], offer: dict[str, Any]) -> None:
    with closing(Node()) as keeper:
        client = PeerClient(keeper.address, SECRET, 2)
        part = PartManifest.from_bytes(offer["part"].encode(), "test")
        longer = PartManifest(
            part.generation,
            part.step,
            part.rank,
            part.blob.__class__(
                "data/0000000002/0000000004-rank00000-0.safetensors",
                part.blob.size,
                part.blob.data_start,
                part.blob.extent_bytes,
                part.blob.checksums,
            ),
            part.tensors,
            part.meta,
        )
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"part": "{}"}, "not a manifest"),
            ({"part": offer["part"].replace("test", "tesu").replace('"F32"', '"F64"')}, "checksum"),
            ({"part": longer.to_bytes().decode()}, "is not the blob of rank 0"),
            ({"ranks": [1]}, "not among the ranks"),
            ({"plan": {"topology": topology(3).to_json(), "table": []}}, "another generation"),
            ({"source": "nowhere"}, "not an address"),
            ({"source": "127.0.0.1:1"}, "cannot be reached"),
        ]
        without = {k: v for k, v in offer.items() if k != "plan"}
        assert client.post(OFFER_PATH, without) == {"state": "plan"}
        for change, words in wrong:
            with pytest.raises(PeerError, match=words):
                client.post(OFFER_PATH, offer | change)
        for missing in ("part", "run", "source", "ranks"):
            with pytest.raises(PeerError, match=missing):
                client.post(OFFER_PATH, {k: v for k, v in offer.items() if k != missing})
        held = {"state": "held", "reused": 0}
        assert client.post(OFFER_PATH, offer) == held
        assert client.post(OFFER_PATH, offer) == held  # asked again: nothing more is done
        assert keeper.do("status")["keeps"]["pulled"] == part.blob.size


def test_ranges_that_are_not_there(nodes: tuple[Node, Node]) -> None:
    client = PeerClient(nodes[0].address, SECRET, 2)
    out = memoryview(bytearray(10))
    with pytest.raises(MissingKeyError, match="not in memory for rank 1"):
        client.read_into(blob_key(2, 3, writer_name(1)), 0, out)
    for key in ("secret", "../secret", commit_key(2, 3), "data/2/3-rank0-0.safetensors"):
        with pytest.raises(PeerError, match="not the key of a blob"):
            client.read_into(key, 0, out)
    with pytest.raises(PeerError, match="bytes"):
        client.read_into(blob_key(2, 3, writer_name(0)), 10**9, out)


@pytest.mark.parametrize(
    "noise",
    [
        b"GET / HTTP/1.1\r\nx: " + b"y" * MAX_HEAD_BYTES,
        b"\x00" * 2 * MAX_HEAD_BYTES,
        b"GET /inventory HTTP/1.1\r\nho",
        b"\x16\x03\x01\x00\xc8\x01\x00\x00\xc4\x03\x03",
    ],
    ids=["too long", "noise", "broken off", "TLS"],
)
def test_whoever_does_not_speak_http_is_counted(noise: bytes) -> None:
    with listening() as (server, address):
        host, _, port = address.rpartition(":")
        with closing(socket.create_connection((host, int(port)), 10)) as connection:
            # The server may close first: then the rest of the noise has nowhere to go.
            with suppress(OSError):
                connection.sendall(noise)
                connection.shutdown(socket.SHUT_WR)
            wait_until(lambda: server.limiter.refusals.totals() == {"peers": {"not ours": 1}})
