"""TLS of a run's listeners: who gets in, who does not, and the sentence for each client."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest
from cryptography import x509

from holdfast.checkpoint.peers.client import PeerClient
from holdfast.errors import HoldfastError
from holdfast.wire.http.async_client import AsyncClient
from holdfast.wire.http.client import Client
from holdfast.wire.http.connection_limits import ConnectionLimiter
from holdfast.wire.http.refusals import CONTROL, Refusals
from holdfast.wire.http.tls import make_client_context, with_tls
from holdfast.wire.secret import Secret
from tests.runtime.checkpoint.peers import test_server as peers
from tests.runtime.launch.holders import agent
from tests.support.attacker import DEADLINE, connect, place
from tests.support.ranks import wait_until

PLAIN = Secret(b"t" * 32)
Opener = Callable[[Secret], tuple[str, Callable[[str, Secret], object]]]
OURS, THEIRS = with_tls(PLAIN), with_tls(Secret(b"q" * 32))


def ask_control(address: str, secret: Secret) -> object:
    client = Client(address, secret, connect_retry_s=0.0)
    try:
        return client.post("/term", {})
    finally:
        client.close()


def ask_from_a_loop(address: str, secret: Secret) -> object:
    async def ask() -> object:
        client = AsyncClient(address, secret)
        try:
            return await client.post("/term", {})
        finally:
            client.close()

    return asyncio.run(ask())


def ask_peer(address: str, secret: Secret) -> object:
    client = PeerClient(address, secret, 1, "run")
    try:
        return client.newest_generation()
    finally:
        client.close()


@pytest.fixture(params=["control", "control from a loop", "peers"])
def listener(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opener]:
    """Opens a listener that uses a secret; its address, and an honest request to it."""
    stack = ExitStack()

    def open_listener(secret: Secret) -> tuple[str, Callable[[str, Secret], object]]:
        if request.param == "peers":
            monkeypatch.setattr(peers, "SECRET", secret)
            return stack.enter_context(peers.listening())[1], ask_peer
        ask = ask_control if request.param == "control" else ask_from_a_loop
        return stack.enter_context(agent(secret)), ask

    with stack:
        yield open_listener


def test_only_the_runs_certificate_gets_in_and_each_other_client_is_told_why(
    listener: Opener,
) -> None:
    encrypted, ask = listener(OURS)
    first = ask(encrypted, OURS)
    with pytest.raises(HoldfastError, match=r"speaks TLS only: set cluster\.tls alike"):
        ask(encrypted, PLAIN)
    with pytest.raises(HoldfastError, match="does not accept this run's secret"):
        ask(encrypted, THEIRS)
    assert ask(encrypted, OURS) == first
    plain, ask = listener(PLAIN)
    with pytest.raises(HoldfastError, match=r"speaks no TLS .* set cluster\.tls alike"):
        ask(plain, OURS)
    assert ask(plain, PLAIN) == first


def without_certificate(version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> ssl.SSLContext:
    """Of a stranger that takes every listener."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = version
    return context


def with_another_certificate() -> ssl.SSLContext:
    context = THEIRS.client_tls
    assert context is not None
    context.verify_mode = ssl.CERT_NONE
    return context


STRANGERS = {
    "no certificate": (without_certificate, "wrong certificate"),
    "another certificate": (with_another_certificate, "wrong certificate"),
    "an older TLS": (lambda: without_certificate(ssl.TLSVersion.TLSv1_2), "not TLS"),
}


@pytest.mark.parametrize("who", STRANGERS)
def test_a_stranger_reads_and_writes_nothing_and_is_counted(who: str) -> None:
    make, reason = STRANGERS[who]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers, "SECRET", OURS)
        with peers.listening() as (server, address):
            assert knock(address, make()) == b""
            wait_until(server.limiter.refusals.totals, DEADLINE, "the count")
            assert server.limiter.refusals.totals() == {"peers": {reason: 1}}
            assert ask_peer(address, OURS) == 0
    limiter = ConnectionLimiter(CONTROL, Refusals())
    with agent(OURS, limiter=limiter) as address:
        assert knock(address, make()) == b""
        wait_until(limiter.refusals.totals, DEADLINE, "the count")
        assert limiter.refusals.totals() == {"control": {reason: 1}}
        ask_control(address, OURS)


def knock(address: str, context: ssl.SSLContext) -> bytes:
    """What comes back for a request in a connection of this kind."""
    found = b""
    plain = socket.create_connection(place(address), DEADLINE)
    with suppress(OSError), plain, context.wrap_socket(plain) as encrypted:
        encrypted.sendall(b"POST /term HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
        while more := encrypted.recv(4096):
            found += more
    return found


def test_unfinished_handshakes_are_cut_in_time_and_hinder_nobody() -> None:
    """Of both listeners: silent ones, and ones that stop in the midst of the first message."""
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(peers, "SECRET", OURS)
        server, peer = stack.enter_context(peers.listening(proof_timeout_s=0.5))
        limiter = ConnectionLimiter(CONTROL, Refusals(), proof_timeout_s=0.5)
        control = stack.enter_context(agent(OURS, limiter=limiter))
        stuck = [stack.enter_context(connect(at)) for at in (peer, control) for _ in range(20)]
        for one in stuck[::2]:
            one.send(b"\x16\x03\x01\x02\x00\x01")
        assert ask_peer(peer, OURS) == 0
        ask_control(control, OURS)
        for one in stuck:
            with suppress(ConnectionResetError):
                assert one.recv(1) == b""
        assert server.limiter.refusals.totals()["peers"]["slow"] == 20
        assert limiter.refusals.totals() == {"control": {"slow": 20}}


def test_every_process_derives_the_same_certificate_whatever_its_clock_says() -> None:
    script = (
        "import sys\n"
        "from holdfast.wire.http.tls import with_tls\n"
        "from holdfast.wire.secret import Secret\n"
        "print(with_tls(Secret(b't' * 32)).certificate.hex())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert bytes.fromhex(done.stdout.decode()) == OURS.certificate
    found = x509.load_der_x509_certificate(OURS.certificate)
    assert found.not_valid_before_utc.year == 1970
    assert found.not_valid_after_utc.year == 9999
    assert with_tls(OURS) is OURS
    assert THEIRS.certificate != OURS.certificate


def test_the_certificate_goes_to_children_with_the_secret_and_shows_nowhere() -> None:
    assert Secret.from_hex(OURS.hex()) == OURS
    assert Secret.from_hex(PLAIN.hex()) == PLAIN
    assert OURS.key.hex() not in repr(OURS)
    assert repr(OURS) == repr(PLAIN) == "Secret()"
    before = set(os.listdir("/proc/self/fd"))
    assert make_client_context(OURS) is not OURS.client_tls
    assert set(os.listdir("/proc/self/fd")) == before
