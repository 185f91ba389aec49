"""The mover as a process: its clients, its refusals, its socket, and its end."""

from __future__ import annotations

import errno
import json
import os
import resource
import secrets
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from holdfast.checkpoint.capture.capturer import CompletedCapture, SkippedCapture
from holdfast.checkpoint.mover import socket_place
from holdfast.checkpoint.mover.client import MoverClient, MoverGoneError
from holdfast.checkpoint.mover.main import MoverSpec
from holdfast.checkpoint.mover.protocol import encode_request
from holdfast.checkpoint.mover.service import MoverSettings
from holdfast.checkpoint.mover.socket_place import (
    MAX_PATH_BYTES,
    SOCKET_NAME,
    MoverSocket,
    make_socket_folder,
)
from holdfast.checkpoint.restore.catalog import list_commits
from holdfast.doctor import checks as doctor_checks
from holdfast.errors import CheckpointError, FencedError, HoldfastError, RunFolderError
from holdfast.events import CheckpointFailed
from holdfast.wire.secret import Secret
from holdfast.wire.term import create_generation
from tests.support import s3
from tests.support.mover_process import TABLE, Start, Workers, assert_holds, files, topology
from tests.support.ranks import wait_until
from tests.support.s3 import Fault, Proxy, Request


def test_without_the_secret_nothing_happens(start: Start) -> None:
    mover = start()
    stranger = MoverClient(mover.socket, Secret(secrets.token_bytes(32)), 1)
    with pytest.raises(MoverGoneError):
        stranger.expect(topology(), TABLE)
    assert mover.client(1).status()["generation"] == 0


def test_stray_and_repeated_bytes_are_harmless(start: Start) -> None:
    mover = start()
    client = mover.begin(topology())

    def send(line: bytes) -> bytes:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(10)
            connection.connect(mover.socket)
            with suppress(OSError):  # the mover may close before all bytes have left
                connection.sendall(line)
                connection.shutdown(socket.SHUT_WR)
            return connection.recv(100)

    for line in (
        b"",
        b"\n",
        b"garbage\n",
        b"{}\n",
        b'{"verb":1,"body":"{}","proof":[]}\n',
        b"\xff",
        b"[" * 100_000 + b"\n",
        b'{"verb":"x","body":"{}","proof":[1e999,"",0,""]}\n',
    ):
        assert send(line) == b""
    once, _ = encode_request(mover.secret, "status", {}, 1, time.time())
    assert b'"status":200' in send(once)
    assert send(once) == b""  # a proof is good for one request
    assert client.status()["generation"] == 1


def test_bad_requests_are_refused_in_words(start: Start) -> None:
    mover = start()
    with pytest.raises(HoldfastError, match="no generation has begun"):
        mover.client(1).get_arena(0, 4096, 2)
    client = mover.begin(topology())
    with pytest.raises(CheckpointError, match="rank 5 is not in a world of 1"):
        client.get_arena(5, 4096, 2)
    with pytest.raises(CheckpointError, match="asks for 2 slots of 4096 bytes"):
        client.get_arena(0, 4096, 2)
    with pytest.raises(HoldfastError, match="has no arena"):
        client.announce_capture(0, 1, 0, 2, {})
    workers = Workers(client, topology())
    with pytest.raises(HoldfastError, match="does not hold step 1"):
        client.announce_capture(0, 1, 0, 2, {})
    workers.commit(2)


def test_an_arena_waits_for_a_generation_that_the_mover_is_about_to_hear_of(start: Start) -> None:
    mover = start()
    mover.begin(topology())
    second = topology(1, generation=2)
    early = MoverClient(mover.socket, mover.secret, 2, arena_wait_s=60.0)
    with ThreadPoolExecutor(1) as pool:
        workers = pool.submit(Workers, early, second)
        mover.begin(second)
        workers.result(120).commit(1)
    with pytest.raises(FencedError):  # one that is over is not waited for
        Workers(MoverClient(mover.socket, mover.secret, 1, arena_wait_s=60.0), topology())


def test_older_generations_are_refused(start: Start) -> None:
    mover = start()
    first = topology(2)
    old = Workers(mover.begin(first), first)
    old.commit(1)
    old.compute(2)
    assert isinstance(old.capturers[0].capture(2), CompletedCapture)
    second = topology(1, generation=2)
    workers = Workers(mover.begin(second), second)
    with pytest.raises(FencedError):
        old.capturers[0].announce(2, {})
    with pytest.raises(FencedError):
        mover.client(1).expect(first, TABLE)
    workers.commit(2)
    found = mover.client(2).find_restore_point()
    assert (found.step, found.generation) == (2, 2)


def test_a_mover_that_was_replaced_elsewhere_cannot_commit(start: Start) -> None:
    """Another agent opened generation 2 in the run store; this mover only finds out by looking."""
    mover = start()
    workers = mover.workers(2)
    workers.commit(1)
    create_generation(mover.store, 2, {})
    workers.save(2)
    reason = workers.capturers[0].wait_until_committed(2, 60)
    assert reason is not None
    assert "generation 2 has begun" in reason
    events, _ = workers.client.events(0)
    assert not [e for e in events if isinstance(e, CheckpointFailed)]  # generation 2 has the say
    assert len(list_commits(mover.store)) == 1
    assert not [name for name in files(mover.store) if "0000000002-rank" in name]


def test_what_older_generations_left_unfinished_is_swept(start: Start) -> None:
    mover = start()
    workers = mover.workers(2)
    workers.commit(1)
    workers.compute(2)
    workers.ranks[0].hand_over(2)
    assert mover.client(1).drain()  # what could be written has been
    assert [n for n in files(mover.store) if "0000000002-rank" in n]
    half = [
        mover.store.folder / f"{place}/.tmp-0123"
        for place in ("data/0000000001", "parts/0000000001", "commits", "data/0000000002")
    ]
    half[-1].parent.mkdir()
    for path in half:  # what a killed mover leaves of an object
        path.write_bytes(b"half")
    mover.begin(topology(2, generation=2))
    wait_until(
        lambda: [path.exists() for path in half] == [False, False, False, True], what="a sweep"
    )
    half[-1].unlink()

    def left() -> list[str]:
        return [n for n in files(mover.store) if n.startswith(("data", "parts"))]

    wait_until(lambda: len(left()) <= 4, what="objects are gone too")
    assert len(left()) == 4
    assert all("0000000001-rank" in name for name in left())


def test_a_slow_sweep_delays_no_answer_and_what_is_written_waits_for_it(
    start: Start, proxy: Proxy, s3_credentials: None
) -> None:
    """The run store is a bucket that holds back the removal of what generation 1 left."""
    armed, reached, gate = threading.Event(), threading.Event(), threading.Event()

    def slow(request: Request) -> Fault | None:
        if armed.is_set() and s3.removes(request):
            reached.set()
            gate.wait(120)
        return None

    proxy.rule = slow
    mover = start(at=s3.location(proxy.address, f"slow-{id(proxy)}", timeout=120))
    topo = topology(2)
    workers = Workers(mover.begin(topo), topo)
    workers.compute(1)
    workers.ranks[0].hand_over(1)
    assert mover.client(1).drain()
    armed.set()
    try:
        topo = topology(generation=2)
        client = mover.begin(topo)
        assert reached.wait(120)
        others = Workers(client, topo)
        others.save(2)
        assert client.wait_until_committed(2, 0.5) == "not committed after 0.5 s"
    finally:
        gate.set()
    assert client.wait_until_committed(2, 60) is None
    assert not [key for key in mover.store.list("data/") if "0000000001-rank" in key]


def test_what_cannot_be_listed_is_not_swept(start: Start) -> None:
    """A disk that errs for a moment: no checkpoint is taken for absent, and none is removed."""
    mover = start()
    workers = mover.workers()
    workers.commit(1)
    commits, aside = mover.store.folder / "commits", mover.store.folder / "aside"
    commits.rename(aside)
    commits.symlink_to("commits")  # reading it is an error, also for root
    swept = mover.begin(topology(generation=2))
    wait_until(lambda: swept.status()["saves"]["warnings"], what="the sweep was given up")
    with pytest.raises(HoldfastError, match="Too many levels"):
        mover.client(2).find_restore_point()
    commits.unlink()
    aside.rename(commits)
    assert mover.client(2).find_restore_point().step == 1


def test_a_proof_that_expired_on_the_way_costs_no_slot(start: Start) -> None:
    """The machine slept between signing and checking: what is asked again is taken."""
    workers = start().workers()
    (capturer,) = workers.capturers
    stale = 0

    def clock() -> float:
        nonlocal stale
        stale -= 1
        return time.time() - (1000 if stale >= 0 else 0)

    workers.client._clock = clock
    for step in (1, 2, 3):
        stale = 1
        workers.commit(step)
    for step in (4, 5, 6):  # longer than is waited for
        stale = 2
        assert isinstance(capturer.capture(step), CompletedCapture)
        assert isinstance(capturer.announce(step, {}), SkippedCapture)
    workers.commit(7)


def test_a_snapshot_is_announced_once_whatever_arrives_twice_or_late(start: Start) -> None:
    workers = start().workers()
    (capturer,) = workers.capturers
    workers.compute(1)
    assert isinstance(capturer.capture(1), CompletedCapture)
    slot, made = capturer._unannounced[1]
    with pytest.raises(HoldfastError, match="does not hold step 9"):
        workers.client.announce_capture(0, 9, slot, made.sequence, {})
    assert capturer._arena.is_held(slot)  # a stranger to this slot cannot give it back
    for _ in range(3):
        workers.client.announce_capture(0, 1, slot, made.sequence, {})
    assert capturer.wait_until_committed(1, 60) is None
    workers.client.announce_capture(0, 1, slot, made.sequence, {})
    assert workers.client.drain()
    events, _ = workers.client.events(0)
    assert [event.kind for event in events] == ["snapshot_complete", "checkpoint_committed"]
    workers.commit(2)


def test_who_waits_for_a_save_can_say_that_he_lives(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = start().workers()
    monkeypatch.setattr("holdfast.checkpoint.mover.client.COMMIT_POLL_S", 0.02)
    said: list[int] = []
    reason = workers.capturers[0].wait_until_committed(1, 1.5, lambda: said.append(1))
    assert reason == "not committed after 1.5 s"
    assert len(said) >= 4


def test_saves_handed_over_count_before_a_restart(start: Start) -> None:
    """A worker dies right after the announcement: the checkpoint is not lost with it."""
    workers = start().workers(2)
    workers.save(3)
    assert workers.client.find_restore_point().step == 3


def test_a_client_outlives_its_mover(start: Start) -> None:
    """Its open connection is of no use then; another mover listens in the same place."""
    mover = start()
    topo = topology()
    client = mover.begin(topo)
    assert client.status()["generation"] == 1
    mover.kill()
    with pytest.raises(MoverGoneError):
        client.status()
    other = start(secret=mover.secret, socket=mover.socket)
    assert client.status()["generation"] == 0
    client.expect(topo, TABLE)
    assert client.status()["generation"] == 1
    other.kill()
    start(secret=mover.secret, socket=mover.socket)
    assert client.status()["generation"] == 0, "straight from one to the next"


def test_a_connection_that_was_cut_costs_nothing(start: Start) -> None:
    mover = start()
    client = mover.begin(topology())
    client.status()
    (connection,) = client._idle_connections
    connection.shutdown(socket.SHUT_RDWR)
    assert client.status()["generation"] == 1
    assert len(client._idle_connections) == 1


def test_a_process_without_descriptors_is_told_that_nobody_answers(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with any unreachable mover: a client that asks again later continues."""
    mover = start()
    client = mover.begin(topology())
    client._idle_connections.pop().close()

    def none(*given: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(socket, "socket", none)
        with pytest.raises(MoverGoneError, match="Too many open files"):
            client.status()
    assert client.status()["generation"] == 1


def test_events_wait_and_go_on_from_a_mark(start: Start) -> None:
    workers = start().workers()
    assert workers.client.events(0) == ([], 0)
    waiting: list[tuple[list[object], int]] = []
    thread = threading.Thread(target=lambda: waiting.append(workers.client.events(0, 20)))  # type: ignore[arg-type]
    thread.start()
    workers.commit(1)
    thread.join(120)
    (first, *_), _ = waiting[0]
    assert first.step == 1  # type: ignore[attr-defined]
    assert workers.client.drain()
    _, mark = workers.client.events(0)
    assert workers.client.events(mark) == ([], mark)


def boot(folder: Path, private: Path, lifeline: int) -> MoverSpec:
    return MoverSpec(
        str(folder),
        f"{private}/m.sock",
        MoverSettings("r", "c", "d"),
        secrets.token_hex(32),
        lifeline,
    )


def test_it_ends_with_its_agent_and_tells_nobody_the_secret(tmp_path: Path) -> None:
    read, write = os.pipe()
    line = boot(tmp_path, tmp_path, read)
    process = subprocess.Popen(
        [sys.executable, "-m", "holdfast.checkpoint.mover.main"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[read],
        start_new_session=True,
    )
    os.close(read)
    assert process.stdin
    assert process.stdout
    process.stdin.write(line.to_json_line())
    process.stdin.close()
    assert json.loads(process.stdout.readline())["ready"]
    for name in ("cmdline", "environ"):
        assert line.secret.encode() not in Path(f"/proc/{process.pid}/{name}").read_bytes()
    assert line.secret not in repr(line)
    assert Path(line.socket).stat().st_mode & 0o077 == 0
    os.close(write)  # what the kernel does when the agent is killed
    watched = os.pidfd_open(process.pid)
    assert select.select([watched], [], [], 5.0)[0], "it outlives its agent"
    os.close(watched)
    process.wait()
    process.stdout.close()


def test_a_mover_that_starts_while_the_run_folder_is_away_says_so(tmp_path: Path) -> None:
    away = tmp_path / "run"
    away.symlink_to(away)
    done = subprocess.run(
        [sys.executable, "-m", "holdfast.checkpoint.mover.main"],
        check=False,
        timeout=120,
        input=boot(away, tmp_path, -1).to_json_line(),
        capture_output=True,
        start_new_session=True,
    )
    assert done.returncode == 2
    (sentence,) = done.stderr.decode().splitlines()
    assert sentence.startswith(f"{away}: the run folder failed: Too many levels of symbolic links")


def test_sigterm_finishes_the_saves_under_way(start: Start) -> None:
    mover = start()
    workers = mover.workers(2)
    workers.save(1)
    mover.process.send_signal(signal.SIGTERM)
    assert mover.process.wait(120) == 0
    (key,) = list_commits(mover.store)
    from holdfast.checkpoint.restore.reader import Checkpoint

    assert_holds(Checkpoint.open(mover.store, key), 1)
    assert isinstance(workers.capturers[0].announce(1, {}), SkippedCapture)


def test_a_mover_without_descriptors_lets_others_wait_and_goes_on(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    mover = start()
    before = resource.prlimit(mover.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(mover.process.pid, resource.RLIMIT_NOFILE, (3, before[1]))
    said = ""
    with socket.socket(socket.AF_UNIX) as knocking:
        knocking.connect(mover.socket)

        def told() -> bool:
            nonlocal said
            said += capfd.readouterr().err
            return "no descriptor left" in said

        wait_until(told, what="a word about it")
    assert mover.process.poll() is None
    resource.prlimit(mover.process.pid, resource.RLIMIT_NOFILE, before)
    assert mover.client(1).status()["generation"] == 0
    assert (said + capfd.readouterr().err).count("no descriptor left") == 1


@pytest.fixture
def long_folder(tmp_path: Path) -> Path:
    folder = tmp_path / ("d" * 112)
    folder.mkdir()
    return folder


def test_a_long_temporary_folder_is_no_obstacle(
    long_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(long_folder))
    with make_socket_folder() as folder:
        path = str(Path(folder) / SOCKET_NAME)
        assert len(os.fsencode(path)) <= MAX_PATH_BYTES
        MoverSocket(path).remove()
    assert {c.name: c.state for c in doctor_checks.run_checks()}["sockets"] == "good"


def test_without_a_place_the_sentence_names_the_variable(
    long_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        socket_place, "socket_places", lambda: (str(long_folder), "/nowhere/at/all")
    )
    with pytest.raises(RunFolderError, match=r"TMPDIR: .*too long.*No such file.*short path"):
        make_socket_folder()
    check = {c.name: c for c in doctor_checks.run_checks()}["sockets"]
    assert (check.state, "TMPDIR" in check.remedy) == ("fails", True)


@pytest.mark.parametrize("cleaned", ["socket", "folder", "everything"])
def test_a_socket_that_a_cleaner_removes_is_made_again(tmp_path: Path, cleaned: str) -> None:
    place = tmp_path / "t"
    place.mkdir()
    folder = Path(tempfile.mkdtemp(dir=place))
    path = folder / SOCKET_NAME
    listener = MoverSocket(str(path))
    leave, told = os.pipe()
    accepted: list[bool] = []
    server = threading.Thread(target=lambda: accepted.append(listener.wait_for_client(leave)))
    if cleaned == "socket":
        path.unlink()
    else:
        shutil.rmtree(folder if cleaned == "folder" else place)
    server.start()
    try:
        wait_until(path.exists, what="the socket to be made again")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        with socket.socket(socket.AF_UNIX) as client:
            # it is there a moment before anyone listens
            wait_until(lambda: client.connect_ex(str(path)) == 0, what="someone to listen")
            server.join(120)
            assert accepted == [True]
    finally:
        os.write(told, b"\0")
        server.join(120)
        os.close(leave)
        os.close(told)


def test_a_folder_that_another_user_made_there_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = MoverSocket(str(tmp_path / "s" / SOCKET_NAME))
    shutil.rmtree(tmp_path / "s")
    (tmp_path / "s").mkdir()
    (tmp_path / "s").chmod(0o777)
    listener.restore()  # refused, and tried again later
    assert not (tmp_path / "s" / SOCKET_NAME).exists()
    (tmp_path / "s").chmod(0o700)
    listener.restore()
    assert (tmp_path / "s" / SOCKET_NAME).exists()
