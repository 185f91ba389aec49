"""An attacker at every listener of ours: requests are refused, counted, and have no effect.

`HOLDFAST_STRANGERS` is how many attempts are made at each listener. `HOLDFAST_STRANGERS_SEED` draws
different ones. The attempts at the agent's control are made at every path that its guard has.
"""

from __future__ import annotations

import json
import os
import re
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from holdfast.checkpoint.mover.client import MoverClient
from holdfast.checkpoint.mover.protocol import request_line
from holdfast.checkpoint.peers import client as peer_wire
from holdfast.checkpoint.peers.client import RANGE, PeerClient
from holdfast.errors import FencedError, HoldfastError
from holdfast.events import RequestsRefused, StepDone
from holdfast.wire.http.auth import Aim
from holdfast.wire.http.client import Client, RequestError
from holdfast.wire.secret import Secret, read_secret
from tests.support.attacked_run import (
    ATTEMPTS,
    DEADLINE,
    REFUSED,
    SEED,
    Stage,
    World,
    attack,
    connecting,
    listening,
    place,
    signing,
    tapped,
)
from tests.support.attacker import MARK, Stranger, lines, statuses, told
from tests.support.ranks import ROOT

ORDERS = {"generation_started", "notice_received", "stop_requested", "emergency_planned",
          "worker_lost", "run_failed", "run_stopped", "non_finite",
          "checkpoint_failed"}  # fmt: skip
"""Kinds of events that an attacker could have caused by a request."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with ExitStack() as stack:
        found = World(tmp_path_factory.mktemp("strangers"))
        stack.callback(found.close)
        yield found
        found.end()


def test_the_agents_control(world: World) -> None:
    paths = list(world.paths)
    assert {"/report", "/store", "/term", "/notice"} <= set(paths)
    bodies = {"/store": {"op": "set", "key": MARK, "value": "AAAA"},
              "/report": {"rank": 0, "step": 10**6, "phase": MARK, "marks": 1, "first": 0,
                          "events": [], "sync": True},
              "/notice": {"seconds": 1, "nodes": [], "leave": True}}  # fmt: skip
    inside = Client(world.control, world.secret, 1)
    outside = Client(world.control, world.secret)

    def state() -> tuple[object, ...]:
        health = json.load(urlopen(f"http://{world.health}/healthz", timeout=DEADLINE))
        health = {k: v for k, v in health.items() if k not in ("step", "committed")}
        names = list(inside.post("/store", {"op": "list"})["keys"])
        files = {str(p.relative_to(world.folder)) for p in world.folder.rglob("*")}
        files = {name for name in files if not name.startswith(("journal", "logs"))}
        kinds = [r.event.kind for r in world.trainer.records() if r.event.kind in ORDERS]
        return health, names, files, kinds, outside.post("/term", {})

    before = state()
    with tapped(world.control) as tap:
        client = Client(tap.address, world.secret, 1)
        for number in range(3):
            client.post("/store", {"op": "check", "keys": [f"{number}"]})
        client.close()
        recorded = tap.requests
    assert len(recorded) == 4  # the answer to the first says for whom to sign
    every = [("POST", path, json.dumps(bodies.get(path, {MARK: 1})).encode()) for path in paths]
    fresh = signing(world.control, world.secret, 1, every, inside._aim)
    stranger = Stranger(SEED, paths, recorded, fresh)
    counts = attack(
        world.control, stranger.attempts(ATTEMPTS), world.trainer.process.pid,
        lambda: inside.post("/store", {"op": "check", "keys": []}), REFUSED,
    )  # fmt: skip
    assert counts[401] > ATTEMPTS // 3, counts
    world.refused["control"] = counts[401]
    assert state() == before
    step = max(e.step for e in world.trainer.events(StepDone))
    world.trainer.wait_step(step + 2, 1)  # training continues
    world.trainer.wait(lambda: world.trainer.events(RequestsRefused), "the first word of it")
    inside.close()
    outside.close()


def test_a_generation_that_is_not_the_newest(world: World) -> None:
    """Rightly signed by a process of the run that is none any more, or not yet, at every path."""
    for path, outside in world.paths.items():
        for generation in (-1, 0, 2, 10**30):
            if outside and generation == 0:
                continue  # asked from outside any generation
            client = Client(world.control, world.secret, generation)
            with pytest.raises((FencedError, RequestError)) as caught:
                client.post(path, {"op": "set", "key": MARK, "value": "AAAA", "leave": True})
            assert "generation" in str(caught.value), path
            client.close()
    found = Client(world.control, world.secret, 1).post("/store", {"op": "list"})["keys"]
    assert MARK not in found


def test_what_everybody_may_read(world: World) -> None:
    def state() -> dict[str, Any]:
        health = json.load(urlopen(f"http://{world.health}/healthz", timeout=DEADLINE))
        return {k: v for k, v in health.items() if k not in ("step", "committed")}

    before = state()
    recorded = [
        f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode() for path in ("/healthz", "/metrics")
    ]
    aim = Aim(time.time)
    asked = [("GET", "/healthz", b""), ("GET", "/metrics", b"")]
    stranger = Stranger(
        SEED, ["/healthz", "/metrics"], recorded,
        signing(world.health, Secret(b"x" * 32), 1, asked, aim), "GET",
    )  # fmt: skip
    counts = attack(
        world.health, stranger.attempts(ATTEMPTS // 2), world.trainer.process.pid, state,
        REFUSED | {200},
    )  # fmt: skip
    assert counts[200] > 0
    world.refused["health"] = counts[404]
    assert state() == before
    assert (
        b"location" not in told(connecting(world.health), b"GET /healthz/ HTTP/1.1\r\n\r\n").lower()
    )


@pytest.mark.parametrize("which", ["mover", "stage"])
def test_where_movers_of_other_machines_ask(world: World, which: str) -> None:
    address, pid = {
        "mover": (world.peers, world.mover), "stage": (world.stage.address, world.stage.process.pid)
    }[which]  # fmt: skip
    mine = MoverClient(world.socket, world.secret, 1)
    run = "" if which == "stage" else identity_of(world)
    honest = PeerClient(address, world.secret, 1, run)

    def state() -> tuple[object, ...]:
        held = (honest.inventory(), honest.newest())
        return held if which == "stage" else (*held, mine.status())

    honest.inventory()
    before = state()
    with tapped(address) as tap:
        client = PeerClient(tap.address, world.secret, 1, run)
        assert client.inventory() == before[0]
        client.newest()
        with pytest.raises(HoldfastError):
            client.offer({"part": "{}", "mark": MARK})
        client.close()
        recorded = tap.requests
    requests = [("GET", f"{RANGE}?run={run}&key=data/1&start=0&stop=9&use=copy", b"")]
    for path in peer_wire_paths():
        requests += [
            ("GET", f"{path}?run={run}", b""),
            ("POST", f"{path}?run={run}", json.dumps({"part": MARK}).encode()),
        ]
    for method in ("GET", "POST"):
        chosen = [r for r in requests if r[0] == method]
        fresh = signing(address, world.secret, 9, chosen, honest.aim)
        stranger = Stranger(SEED, [r[1] for r in chosen], recorded, fresh, method)
        counts = attack(address, stranger.attempts(ATTEMPTS // 2), pid, honest.newest, REFUSED)
        assert counts[401] > ATTEMPTS // 8, counts
        world.refused[which] = counts[401]
    assert state() == before  # so generation 9, which was never received completely, fences no node
    honest.close()


def peer_wire_paths() -> list[str]:
    """Everything that a mover asks another one."""
    named = vars(peer_wire).values()
    found = [value for value in named if isinstance(value, str) and value.startswith("/")]
    assert {"/inventory", "/offer", "/newest", "/range"} <= set(found)
    return found


def identity_of(world: World) -> str:
    """What the mover takes for its run, from the journal."""
    from holdfast.checkpoint.peers.client import identity
    from holdfast.events import RunStarted

    (started,) = world.trainer.events(RunStarted)
    return identity(started.config_hash, started.dataset_version)


def test_the_movers_own_socket(world: World) -> None:
    """Other users cannot reach it; a process of ours without the secret gets nothing."""
    mine = MoverClient(world.socket, world.secret, 1)
    before = mine.status()
    connect = connecting(world.socket)
    once, _ = request_line(world.secret, "status", {}, 1, time.time())
    assert b'"status":200' in told(connect, once)
    guessed = Secret(b"guessed by a stranger, not known")

    def fresh() -> bytes:
        return request_line(guessed, "drain", {"wait": 0, "mark": MARK}, 1, time.time())[0]

    attack(world.socket, lines(SEED, ATTEMPTS // 2, [once], fresh), world.mover, mine.status, set())
    assert mine.status() == before
    path = Path(world.socket)
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become another user")
def test_another_user_of_the_machine(world: World) -> None:
    """Even one who has the secret, and was let into the folder."""
    line = request_line(world.secret, "status", {}, 1, time.time())[0]
    script = (
        "import os, socket, sys\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "s = socket.socket(socket.AF_UNIX)\n"
        "s.settimeout(60)\n"
        "try: s.connect(sys.argv[1])\n"
        "except PermissionError: sys.exit('not let in')\n"
        "try: s.sendall(sys.stdin.buffer.read()); print(s.recv(100))\n"
        "except (BrokenPipeError, ConnectionResetError): print(b'')\n"
    )
    path = Path(world.socket)

    def try_it() -> str:
        done = subprocess.run([sys.executable, "-c", script, world.socket], input=line,
                              capture_output=True, check=False)  # fmt: skip
        return (done.stdout + done.stderr).decode().strip()

    assert try_it() == "not let in"
    path.parent.chmod(0o755)
    path.chmod(0o666)
    try:
        assert try_it() == "b''"  # nothing is read of it
    finally:
        path.chmod(0o600)
        path.parent.chmod(0o700)
    assert b'"status":200' in told(connecting(world.socket), line)


def test_a_crowd_of_silent_connections(world: World) -> None:
    """More than there is room for, at every listener; a client with the secret is served."""
    clients: dict[str, Callable[[], object]] = {
        world.control: lambda: Client(world.control, world.secret, 1).post(
            "/store", {"op": "check", "keys": []}
        ),
        world.health: lambda: urlopen(f"http://{world.health}/healthz", timeout=DEADLINE).read(),
        world.peers: lambda: PeerClient(world.peers, world.secret, 1).newest(),
        world.stage.address: lambda: PeerClient(world.stage.address, world.secret, 1).newest(),
    }
    for address, ask in clients.items():
        with ExitStack() as stack:
            for number in range(150):
                silent = stack.enter_context(connecting(address)())
                if number % 2:
                    silent.send(b"POST /report HTTP/1.1\r\nhost: x\r\n")
            ask()


def test_nobody_listens_but_those_in_the_table(world: World) -> None:
    """All on the addresses that the run file names (127.0.0.1 by default), and docs/security.md
    has a row for each."""
    family = world.trainer.family()
    found = listening(family)
    named = {world.control, world.health, world.peers, world.socket}
    assert named <= set(found)
    workers = family - {world.trainer.process.pid, world.mover}
    others = {address: pid for address, pid in found.items() if address not in named}
    assert set(others.values()) <= workers  # gloo's
    assert all(address.startswith("127.0.0.1:") for address in others), others
    assert all(a.startswith("127.0.0.1:") for a in named - {world.socket})
    table = (ROOT / "docs" / "security.md").read_text()
    for words in ("`cluster.interface`", "`cluster.metrics_port`", "`checkpoint.peer_interface`",
                  "`holdfast stage`", "`cluster.gloo_interface`", "unix socket"):  # fmt: skip
        assert words in table


# --- what was recorded, and what comes back -----------------------------------------------------
def test_a_recording_is_of_no_use_after_a_restart(tmp_path: Path) -> None:
    """The process that has the port now has never seen the nonce, but the listener's name differs.
    A client of ours continues."""
    secret = Secret(b"r" * 32)
    first = Stage(secret, tmp_path / "secret")
    client = PeerClient(first.address, secret, 7, "this run")
    client.inventory()
    with tapped(first.address) as tap:
        other = PeerClient(tap.address, secret, 7, "this run")
        other.inventory()
        other.close()
    first.close()
    second = Stage(secret, tmp_path / "secret", place(first.address)[1])
    try:
        for request in tap.requests:
            assert statuses(told(connecting(second.address), request)) == [421]
        assert client.newest() == 0  # nothing of it has been heard
        assert client.inventory() == {"snapshots": [], "plans": {}}
        assert client.newest() == 7
    finally:
        client.close()
        second.close()


def test_an_answer_that_was_changed_on_the_way(world: World) -> None:
    """A man in the middle changes it: a client accepts the answer to its own request, or
    nothing."""
    from random import Random

    random = Random(SEED)
    earlier: list[bytes] = []

    def change(answer: bytes) -> bytes:
        head, _, body = answer.partition(b"\r\n\r\n")
        earlier.append(answer)
        choice = random.randrange(6)
        if choice == 0 and len(earlier) > 1:
            return random.choice(earlier[:-1])
        if choice == 1:
            status = random.choice((b"200", b"409", b"400", b"421", b"413", b"500", b"404"))
            return re.sub(rb"^HTTP/1.1 \d+", b"HTTP/1.1 " + status, head) + b"\r\n\r\n" + body
        if choice == 2 and body:
            at = random.randrange(len(body))
            return head + b"\r\n\r\n" + body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]
        if choice == 3:
            return answer[: random.randrange(len(answer))] + b"\r\n\r\n"
        if choice == 4:
            return re.sub(rb"holdfast-hmac: ..", b"holdfast-hmac: 00", head) + b"\r\n\r\n" + body
        return b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"

    right = PeerClient(world.stage.address, world.secret, 1).newest()
    taken = 0
    with tapped(world.stage.address, change) as stage, tapped(world.control, change) as control:
        for number in range(60):
            peer = PeerClient(stage.address, world.secret, 1, timeout=2)
            client = Client(control.address, world.secret, 1, patience=0.0)
            try:
                found = peer.newest()
            except FencedError:
                pytest.fail("a forged refusal was believed")
            except HoldfastError:
                pass
            else:
                assert found == right
                taken += 1
            try:
                answer = client.post("/store", {"op": "check", "keys": [f"{number}"]}, 2)
            except FencedError:
                pytest.fail("a forged refusal was believed")
            except HoldfastError:
                pass
            else:
                assert answer == {"all": False}
                taken += 1
            peer.close()
            client.close()
    assert taken < 120


def test_a_secret_that_somebody_else_wrote_is_refused(tmp_path: Path) -> None:
    from holdfast.errors import RunFolderError

    if os.getuid() != 0:
        pytest.skip("only root can give a file away")
    path = tmp_path / "secret"
    path.write_text("00" * 32)
    path.chmod(0o600)
    os.chown(path, 65534, 65534)
    with pytest.raises(RunFolderError, match="belongs to another user"):
        read_secret(path)


@pytest.mark.parametrize(
    ("length", "said"),
    [(b"", "how long it is"), (b"content-length: 1000000000000\r\n", "too long")],
)
def test_an_endless_answer_fills_nobodys_memory(length: bytes, said: str) -> None:
    """The process that has the port now sends without end."""
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
