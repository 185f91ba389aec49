"""Bad requests to every listener of a run: all are refused and counted, and none has an effect.

The table has a row for each listener. A row's test sends all kinds of bad requests by turns: 16
over HTTP, 9 over the mover's socket. HOLDFAST_ATTEMPTS sets the number, HOLDFAST_ATTEMPTS_SEED
draws other requests.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from typing import Any
from urllib.request import urlopen

import pytest

from holdfast.checkpoint.mover.client import MoverClient
from holdfast.checkpoint.mover.protocol import encode_request
from holdfast.checkpoint.peers import client as peer_wire
from holdfast.checkpoint.peers.client import OFFER_PATH, RANGE_PATH, PeerClient
from holdfast.checkpoint.peers.messages import Inventory
from holdfast.errors import FencedError, HoldfastError
from holdfast.events import RequestsRefused, StepDone
from holdfast.wire.http.auth import ListenerIdentity
from holdfast.wire.http.client import Client, RequestError
from holdfast.wire.http.tls import UPGRADE_STATUS, with_tls
from holdfast.wire.secret import Secret
from tests.support.agents import SECRET
from tests.support.attacked_run import AttackedRun, fleet, listening
from tests.support.attacker import (
    DEADLINE,
    GUESSED,
    MARK,
    REFUSED,
    Attacker,
    HttpAttacker,
    LineAttacker,
    answer_to,
    attack,
    connect,
    signing,
    statuses,
    tapped,
)
from tests.support.ranks import ROOT

ATTEMPTS = int(os.environ.get("HOLDFAST_ATTEMPTS", "600"))
MANY = pytest.param(10_000, marks=pytest.mark.slow)
SEED = int(os.environ.get("HOLDFAST_ATTEMPTS_SEED", "6"))

UNPROVEN = ("replayed", "changed", "twice the same header")
"""Kinds that a guarded listener always refuses with 401, for lack of a valid proof."""

CAUSED = {
    "generation_started",
    "notice_received",
    "stop_requested",
    "emergency_planned",
    "worker_lost",
    "run_failed",
    "run_stopped",
    "non_finite",
    "checkpoint_failed",
}
"""Kinds of events that an accepted request could cause."""

CHECK = {"op": "check", "keys": []}
BEAT = {
    "name": "ghost",
    "mark": "m",
    "places": 1,
    "at": 1,
    "stage": "working",
    "told": {},
    "term": 1,
    "seen": 0,
    "nodes": ["a"],
}
BODIES = {
    "/store": {"op": "set", "key": MARK, "value": "AAAA"},
    "/report": {
        "rank": 0,
        "step": 10**6,
        "phase": MARK,
        "marks": 1,
        "first": 0,
        "events": [{"kind": "run_failed", "event": {"reason": MARK, "step": 1}}],
        "sync": True,
    },
    "/notice": {"seconds": 1, "nodes": [], "leave": True},
    "/join": BEAT,
    "/beat": BEAT,
}
"""Bodies that would have an effect under a right proof, by path."""


@dataclass(frozen=True)
class Row:
    """One listener."""

    address: str
    pid: int | None  # of its process; None for the test's own
    attackers: Sequence[Attacker]  # each makes half of the attempts
    honest: Callable[[], object]  # a request that is served between the bad ones
    state: Callable[[], object]  # what no bad request may change
    allowed: frozenset[int] = REFUSED
    tls: Secret | None = None  # the certificate that attackers have stolen, without the proof's key
    refused: int = 401


@pytest.fixture(
    scope="module", params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "tls"]
)
def run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[AttackedRun]:
    with ExitStack() as stack:
        found = AttackedRun(tmp_path_factory.mktemp("attacked"), request.param)
        stack.callback(found.close)
        yield found
        found.end()


# --- the table ----------------------------------------------------------------------------------
@contextmanager
def control(run: AttackedRun) -> Iterator[Row]:
    """The agent's control listener, at every path that its guard has."""
    paths = list(run.paths)
    assert {"/report", "/store", "/term", "/notice"} <= set(paths)
    inside, outside = Client(run.control, run.secret, 1), Client(run.control, run.secret)

    def state() -> tuple[object, ...]:
        names = list(inside.post("/store", {"op": "list"})["keys"])
        files = {str(path.relative_to(run.folder)) for path in run.folder.rglob("*")}
        # the agent writes these by itself, by the clock
        own = ("journal", "logs"), ("-alive",)
        files = {n for n in files if not n.startswith(own[0]) and not n.endswith(own[1])}
        kinds = [r.event.kind for r in run.trainer.records() if r.event.kind in CAUSED]
        return health_of(run), names, files, kinds, outside.post("/term", {})

    attacker = control_attacker(inside, run.control, run.secret, 1, paths, "/store", CHECK)
    yield Row(
        run.control,
        run.agent,
        [attacker] * 2,
        lambda: inside.post("/store", CHECK),
        state,
        tls=run.secret,
    )
    step = max(event.step for event in run.trainer.events(StepDone))
    run.trainer.wait_step(step + 2, 1)  # the training continues
    run.trainer.wait(lambda: run.trainer.events(RequestsRefused), "the first report of refusals")
    inside.close()
    outside.close()


@contextmanager
def agents(run: AttackedRun) -> Iterator[Row]:
    """The listener where agents join and follow their coordinator; two agents without trainers."""
    secret = with_tls(SECRET) if run.secret.uses_tls else SECRET
    with agents_in(Path(mkdtemp(dir=run.folder.parent)), secret) as row:
        yield row


@contextmanager
def agents_in(folder: Path, secret: Secret) -> Iterator[Row]:
    with fleet(folder, secret) as (pair, store):
        (leader,) = (agent for agent in pair if agent.reigns)
        coordinator = leader.follower.coordinator
        assert coordinator is not None
        paths = list(leader.follower.handlers)
        assert {"/join", "/beat", "/term"} <= set(paths)
        honest = Client(leader.address, secret)

        def state() -> tuple[object, ...]:
            reign = coordinator.state
            return (
                reign.term,
                reign.phase,
                reign.generation,
                reign.members,
                reign.node_names,
                reign.lost_members,
                set(coordinator.node_reports),
                store.list(""),
                [agent.work.history for agent in pair],
                [
                    [line for line in agent.said if "has joined the run" not in line]
                    for agent in pair
                ],
            )

        assert state()[-1] == [[], []]
        attacker = control_attacker(honest, leader.address, secret, 0, paths, "/term", {})
        yield Row(
            leader.address, None, [attacker], lambda: honest.post("/term", {}), state, tls=secret
        )
        honest.close()


@contextmanager
def health(run: AttackedRun) -> Iterator[Row]:
    """The pages that every client may read."""
    paths = ["/healthz", "/metrics"]
    recorded = [f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode() for path in paths]
    requests = [("GET", path, b"") for path in paths]
    fresh = signing(run.health, GUESSED, 1, requests, ListenerIdentity(time.time))
    attacker = HttpAttacker(SEED, paths, recorded, fresh, "GET")

    def state() -> object:
        return health_of(run)

    allowed = REFUSED | {200}
    yield Row(run.health, run.agent, [attacker], state, state, allowed, refused=404)
    redirected = answer_to(run.health, b"GET /healthz/ HTTP/1.1\r\n\r\n")
    assert b"location" not in redirected.lower()


def peers_at(
    address: str, pid: int, run: AttackedRun, identity: str, more: Callable[[], object]
) -> Iterator[Row]:
    """A listener that movers of other machines ask. more: additional state."""
    honest = PeerClient(address, run.secret, 1, identity)

    def state() -> tuple[object, ...]:
        return honest.inventory(), honest.newest_generation(), more()

    inventory = honest.inventory()
    with tapped(address, tls=run.secret) as tap:
        client = PeerClient(tap.address, run.secret, 1, identity)
        assert client.inventory() == inventory
        client.newest_generation()
        with pytest.raises(HoldfastError):
            client.post(OFFER_PATH, {"part": "{}", "mark": MARK})
        client.close()
    named = [value for value in vars(peer_wire).values() if isinstance(value, str)]
    paths = [f"{path}?run={identity}" for path in named if path.startswith("/")]
    assert {"/inventory", "/offer", "/newest", "/range"} <= {path.split("?")[0] for path in paths}
    attackers = []
    body = json.dumps({"part": MARK}).encode()
    get = [
        ("GET", path, b"")
        for path in [f"{RANGE_PATH}?run={identity}&key=data/1&start=0&stop=9&use=copy", *paths]
    ]
    for requests in (get, [("POST", path, body) for path in paths]):
        # Of generation 9: a request that was believed would change the newest generation.
        fresh = signing(address, run.secret, 9, requests, honest.listener_identity)
        asked = [path for _, path, _ in requests]
        attackers.append(HttpAttacker(SEED, asked, tap.requests, fresh, requests[0][0]))
    yield Row(address, pid, attackers, honest.newest_generation, state, tls=run.secret)
    honest.close()


@contextmanager
def mover(run: AttackedRun) -> Iterator[Row]:
    mine = MoverClient(run.socket, run.secret, 1)
    yield from peers_at(run.peers, run.mover, run, run.run_identity, mine.status)


@contextmanager
def stage(run: AttackedRun) -> Iterator[Row]:
    yield from peers_at(run.stage.address, run.stage.process.pid, run, "", lambda: None)


@contextmanager
def mover_socket(run: AttackedRun) -> Iterator[Row]:
    """The mover's unix socket; a process of the same user, without the secret, gets no answer."""
    mine = MoverClient(run.socket, run.secret, 1)
    once, _ = encode_request(run.secret, "status", {}, 1, time.time())
    assert b'"status":200' in answer_to(run.socket, once)

    def fresh() -> bytes:
        return encode_request(GUESSED, "drain", {"wait": 0, "mark": MARK}, 1, time.time())[0]

    attacker = LineAttacker(SEED, once, fresh)
    yield Row(run.socket, run.mover, [attacker], mine.status, mine.status, frozenset(), refused=0)


LISTENERS: list[Callable[[AttackedRun], AbstractContextManager[Row]]] = [
    control,
    agents,
    health,
    mover,
    stage,
    mover_socket,
]


MOVING_FIELDS = ("step", "committed", "seconds_at_step")


def health_of(run: AttackedRun) -> dict[str, Any]:
    found = json.load(urlopen(f"http://{run.health}/healthz", timeout=DEADLINE))
    return {key: value for key, value in found.items() if key not in MOVING_FIELDS}


def control_attacker(
    honest: Client,
    address: str,
    secret: Secret,
    generation: int,
    paths: list[str],
    path: str,
    body: dict[str, Any],
) -> HttpAttacker:
    """Return an attacker that has recorded `body` at `path` and intercepted requests to `paths`."""
    honest.post(path, body)  # learns the listener's name
    with tapped(address, tls=secret) as tap:
        client = Client(tap.address, secret, generation)
        for _ in range(3):
            client.post(path, body)
        client.close()
    assert len(tap.requests) == 4  # the first one learns the name
    requests = [("POST", path, json.dumps(BODIES.get(path, {MARK: 1})).encode()) for path in paths]
    fresh = signing(address, secret, generation, requests, honest._listener)
    return HttpAttacker(SEED, paths, tap.requests, fresh)


@pytest.mark.parametrize("attempts", [ATTEMPTS, MANY])
@pytest.mark.parametrize("listener", LISTENERS)
def test_bad_requests(
    run: AttackedRun, listener: Callable[[AttackedRun], AbstractContextManager[Row]], attempts: int
) -> None:
    with listener(run) as row:
        refused = attack_row(row, attempts)
    run.refused[listener.__name__] = run.refused.get(listener.__name__, 0) + refused


def attack_row(row: Row, attempts: int) -> int:
    """Make all kinds of attempts at a listener; return how many got its usual refusal."""
    before = row.state()
    counts = Counter[tuple[str, int]]()
    for attacker in row.attackers:
        counts += attack(
            row.address, attacker, attempts // 2, row.pid, row.honest, row.allowed, row.tls
        )
    assert row.state() == before
    if row.refused == 401:
        assert {status for kind, status in counts if kind in UNPROVEN} == {401}, counts
    refused = sum(count for (_, status), count in counts.items() if status == row.refused)
    assert refused > counts.total() // 30, counts
    return refused


def test_bad_requests_over_tls(tmp_path: Path) -> None:
    """The proofs hold where TLS is passed; without TLS, no bad request reaches them."""
    with agents_in(tmp_path, with_tls(SECRET)) as row:
        attack_row(row, 640)
        outside = attack(
            row.address, row.attackers[0], 320, None, row.honest, frozenset({UPGRADE_STATUS})
        )
    statuses = {kind: status for kind, status in outside if kind != "another protocol"}
    assert set(statuses.values()) <= {0, UPGRADE_STATUS}, outside
    assert statuses["no proof"] == statuses["replayed"] == UPGRADE_STATUS, outside


def test_a_generation_that_is_not_the_newest(run: AttackedRun) -> None:
    """A right proof of an older generation, or of one that has not begun: refused at every path."""
    for path, outside in run.paths.items():
        for generation in (-1, 0, 2, 10**30):
            if outside and generation == 0:
                continue  # a request without a generation may ask this path
            client = Client(run.control, run.secret, generation)
            with pytest.raises((FencedError, RequestError)) as caught:
                client.post(path, {"op": "set", "key": MARK, "value": "AAAA", "leave": True})
            assert "generation" in str(caught.value), path
            client.close()
    found = Client(run.control, run.secret, 1).post("/store", {"op": "list"})["keys"]
    assert MARK not in found


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become another user")
def test_another_user_of_the_machine(run: AttackedRun) -> None:
    """Another user is refused, also with the secret and with access to the folder."""
    line = encode_request(run.secret, "status", {}, 1, time.time())[0]
    script = (
        "import os, socket, sys\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "s = socket.socket(socket.AF_UNIX)\n"
        "s.settimeout(60)\n"
        "try: s.connect(sys.argv[1])\n"
        "except PermissionError: sys.exit('no access')\n"
        "try: s.sendall(sys.stdin.buffer.read()); print(s.recv(100))\n"
        "except (BrokenPipeError, ConnectionResetError): print(b'')\n"
    )
    path = Path(run.socket)

    def try_it() -> str:
        done = subprocess.run(
            [sys.executable, "-c", script, run.socket], input=line, capture_output=True, check=False
        )
        return (done.stdout + done.stderr).decode().strip()

    assert try_it() == "no access"
    path.parent.chmod(0o755)
    path.chmod(0o666)
    try:
        assert try_it() == "b''"  # the mover reads no byte of it
    finally:
        path.chmod(0o600)
        path.parent.chmod(0o700)
    assert b'"status":200' in answer_to(run.socket, line)


def test_a_secret_of_the_environment_reaches_no_child(run: AttackedRun) -> None:
    """The agent was started with it in HOLDFAST_SECRET."""
    key = run.secret.key.hex().encode()
    family = run.trainer.family()
    holders = {pid for pid in family if key in Path(f"/proc/{pid}/environ").read_bytes()}
    assert holders == {run.agent}
    assert not [pid for pid in family if key in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert not (run.folder / "secret").exists()


def test_a_crowd_of_silent_connections(run: AttackedRun) -> None:
    """Each listener gets 150 silent connections and still serves a client with the secret."""
    clients: dict[str, Callable[[], object]] = {
        run.control: lambda: Client(run.control, run.secret, 1).post("/store", CHECK),
        run.health: lambda: urlopen(f"http://{run.health}/healthz", timeout=DEADLINE).read(),
        run.peers: lambda: PeerClient(run.peers, run.secret, 1).newest_generation(),
        run.stage.address: lambda: PeerClient(run.stage.address, run.secret, 1).newest_generation(),
    }
    for address, ask in clients.items():
        with ExitStack() as stack:
            for number in range(150):
                silent = stack.enter_context(connect(address))  # before any handshake
                if number % 2:
                    silent.send(b"POST /report HTTP/1.1\r\nhost: x\r\n")
            ask()


def test_only_listeners_of_the_table_exist(run: AttackedRun) -> None:
    """All have the address of the run file (127.0.0.1 by default) and a row in
    docs/guide/security.md. Only this user reaches the mover's socket."""
    family = run.trainer.family()
    found = listening(family)
    named = {run.control, run.health, run.peers, run.socket}
    assert named <= set(found)
    workers = family - {run.agent, run.mover}
    unnamed = {address: pid for address, pid in found.items() if address not in named}
    assert set(unnamed.values()) <= workers  # gloo's
    assert all(address.startswith("127.0.0.1:") for address in set(found) - {run.socket}), found
    path = Path(run.socket)
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    table = (ROOT / "docs" / "guide" / "security.md").read_text()
    for words in (
        "`cluster.interface`",
        "`cluster.metrics_port`",
        "`checkpoint.peer_interface`",
        "`holdfast stage`",
        "`cluster.gloo_interface`",
        "unix socket",
    ):
        assert words in table


def test_a_recording_is_useless_after_a_restart(run: AttackedRun) -> None:
    """The new process has never seen the nonces, but has another name. Honest clients learn it."""
    client = PeerClient(run.stage.address, run.secret, 1, "this run")
    client.inventory()
    with tapped(run.stage.address, tls=run.secret) as tap:
        other = PeerClient(tap.address, run.secret, 1, "this run")
        other.inventory()
        other.close()
    run.restart_stage()
    assert tap.requests
    for request in tap.requests:
        assert statuses(answer_to(run.stage.address, request, tls=run.secret)) == [421]
    assert client.newest_generation() == 0  # the new process took nothing from the recording
    assert client.inventory() == Inventory((), {})
    assert client.newest_generation() == 1
    client.close()


# --- answers ------------------------------------------------------------------------------------
def test_an_answer_that_was_changed(run: AttackedRun) -> None:
    """A client accepts the true answer to its own request, or none."""
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

    right = PeerClient(run.stage.address, run.secret, 1).newest_generation()
    taken = 0
    with (
        tapped(run.stage.address, change, run.secret) as stage,
        tapped(run.control, change, run.secret) as control,
    ):
        for number in range(60):
            peer = PeerClient(stage.address, run.secret, 1, silence_timeout_s=2)
            client = Client(control.address, run.secret, 1, connect_retry_s=0.0)
            try:
                found = peer.newest_generation()
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
