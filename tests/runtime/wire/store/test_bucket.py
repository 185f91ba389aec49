"""A bucket over real HTTP: who wins, what is sent again, and what is said when it fails."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.errors import CorruptError, StoreError
from holdfast.events import StepDone
from holdfast.wire.journal import JournalTail, JournalWriter, read_journal, segment_key
from holdfast.wire.store.bucket import PART_BYTES, BucketStore
from holdfast.wire.store.location import open_store, probe_store
from holdfast.wire.store.run_store import AlreadyExistsError, MissingKeyError
from tests.support import s3
from tests.support.s3 import Fault, Proxy, Request

MIB = 2**20
QUICK = {"timeout": 1, "retries": 1}
LARGE = PART_BYTES + 3 * MIB

pytestmark = pytest.mark.usefixtures("s3_credentials")


def _open(address: tuple[str, int], prefix: str = "", **options: object) -> BucketStore:
    store = open_store(s3.location(address, prefix, **options))
    assert isinstance(store, BucketStore)
    return store


def _child(script: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


# --- what a store must promise ---------------------------------------------------------------
def test_the_probe_accepts_a_store_that_keeps_its_promises_and_leaves_nothing() -> None:
    store = _open(s3.server())
    probe_store(store, store.where)
    assert store.list("") == []


def test_the_probe_refuses_a_store_that_ignores_preconditions(proxy: Proxy) -> None:
    """As s3rver does: If-None-Match is accepted, and what is there is overwritten."""
    proxy.drop_headers = frozenset({"if-none-match"})
    store = _open(proxy.address)
    with pytest.raises(StoreError, match="overwrites what is there instead of refusing") as caught:
        probe_store(store, store.where)
    assert "\n" not in str(caught.value)
    assert store.list("") == []


@pytest.mark.skipif("HOLDFAST_S3RVER" not in os.environ, reason="HOLDFAST_S3RVER is not set")
def test_s3rver_itself_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HOLDFAST_S3RVER is the path of its program, as npm installs it."""
    command = [os.environ["HOLDFAST_S3RVER"], "-d", str(tmp_path), "-a", "127.0.0.1", "-p", "0"]
    process = subprocess.Popen(
        [*command, "--configure-bucket", s3.BUCKET], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        while "listening on" not in (line := process.stdout.readline()):
            assert line, "s3rver has ended"
        port = int(line.strip().rpartition(":")[2])
        for name in s3.CREDENTIALS:
            monkeypatch.setenv(name, "S3RVER")
        store = _open(("127.0.0.1", port))
        with pytest.raises(StoreError, match="overwrites what is there instead of refusing"):
            probe_store(store, store.where)
    finally:
        process.kill()
        process.communicate(timeout=120)


def test_of_two_processes_that_commit_one_step_exactly_one_wins() -> None:
    script = """
        import sys
        from holdfast.wire.store.run_store import AlreadyExistsError
        from holdfast.wire.store.location import open_store
        store = open_store(sys.argv[1])
        store.list("commits/")  # connected
        print("ready", flush=True)
        sys.stdin.readline()
        won = []
        for step in range(20):
            try:
                store.create(f"commits/{step:04d}.json", sys.argv[2].encode() * 100)
                won.append(step)
            except AlreadyExistsError:
                pass
        print(*won)
    """
    prefix = secrets.token_hex(8)
    where = s3.location(s3.server(), prefix)
    racers = [_child(script, where, name) for name in "ab"]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    won = [set(map(int, racer.communicate(timeout=120)[0].split())) for racer in racers]
    assert won[0] | won[1] == set(range(20))
    assert not won[0] & won[1]
    store = _open(s3.server(), prefix)
    for step in range(20):
        winner = b"a" if step in won[0] else b"b"
        assert store.get(f"commits/{step:04d}.json") == winner * 100


def test_a_create_whose_answer_was_lost_is_known_as_our_own(proxy: Proxy) -> None:
    """The server has created the object and says 500; asked again, it says that it is there."""
    failed: list[Request] = []

    def rule(request: Request) -> Fault | None:
        if request.method == "PUT" and not failed:
            failed.append(request)
            return Fault(500, forward=True)
        return None

    proxy.rule = rule
    store = _open(proxy.address)
    store.create("terms/1.json", b"ours")
    assert [r.method for r in proxy.log] == ["PUT", "PUT", "HEAD"]
    with pytest.raises(AlreadyExistsError):
        store.create("terms/1.json", b"ours")


# --- large blobs -----------------------------------------------------------------------------
def test_a_large_blob_arrives_whole_although_its_source_uses_one_buffer_again(proxy: Proxy) -> None:
    content = secrets.token_bytes(3 * PART_BYTES + 12345)

    def source() -> Iterator[memoryview]:
        buffer = bytearray(1_000_003)
        for start in range(0, len(content), len(buffer)):
            piece = content[start : start + len(buffer)]
            buffer[: len(piece)] = piece
            yield memoryview(buffer)[: len(piece)]

    store = _open(proxy.address)
    store.create("data/1/blob", source())
    assert len([r for r in proxy.log if "partNumber" in r.query]) == 4
    assert store.get("data/1/blob") == content
    assert store.size("data/1/blob") == len(content)
    out = bytearray(len(content) - 5)  # in several requests
    store.read_into("data/1/blob", 5, memoryview(out))
    assert out == content[5:]
    with pytest.raises(CorruptError, match=f"ends at byte {len(content)}"):
        store.read_into("data/1/blob", 6, memoryview(out))
    assert store.list("") == ["data/1/blob"]
    store.delete("data/1/blob")
    assert store.list("") == []


def test_a_blob_that_is_there_is_not_sent_again_and_never_replaced(proxy: Proxy) -> None:
    content = secrets.token_bytes(LARGE)
    store = _open(proxy.address)
    store.create("data/1/blob", content)
    proxy.log.clear()
    store.create("data/1/blob", [content[:100], content[100:]])
    assert proxy.sent("data/1/blob") == 0
    for other in (bytes(LARGE), content[:-1], content + b"x"):
        with pytest.raises(AlreadyExistsError):
            store.create("data/1/blob", other)
    assert proxy.sent("data/1/blob") == 0
    assert store.get("data/1/blob") == content
    with pytest.raises(AlreadyExistsError):  # a small object is nobody's to resume
        store.create("data/1/blob", b"small")


def test_a_source_that_fails_leaves_nothing() -> None:
    def source() -> Iterator[bytes]:
        yield bytes(PART_BYTES + 1)
        raise CorruptError("the slot has changed")

    store = _open(s3.server())
    with pytest.raises(CorruptError, match="the slot has changed"):
        store.create("data/1/blob", source())
    assert store.list("") == []
    store.create("data/1/blob", bytes(LARGE))
    assert store.size("data/1/blob") == LARGE


UPLOAD = f"""
    import random, sys
    from holdfast.wire.store.location import open_store
    store = open_store(sys.argv[1])
    for number in range(3):
        content = random.Random(number).randbytes({LARGE})
        store.create(f"data/1/rank{{number}}", iter([content]))
    print("done")
"""


def test_the_upload_of_a_killed_process_is_resumed(proxy: Proxy) -> None:
    """Killed inside the second of three blobs: the first is not sent again, counted in bytes."""
    reached = threading.Event()

    def stall(request: Request) -> Fault | None:
        if request.key.endswith("data/1/rank1") and "partNumber=2" in request.query:
            reached.set()
            proxy.closing.wait(120)
        return None

    proxy.rule = stall
    prefix = secrets.token_hex(8)
    first = _child(UPLOAD, s3.location(proxy.address, prefix))
    assert reached.wait(120)
    first.kill()
    first.communicate(timeout=120)
    assert proxy.sent("data/1/rank0") >= LARGE
    assert _open(s3.server(), prefix).list("") == ["data/1/rank0"]
    with s3.proxied() as second_proxy:
        second = _child(UPLOAD, s3.location(second_proxy.address, prefix))
        assert second.communicate(timeout=120)[0] == "done\n"
        assert second_proxy.sent("data/1/rank0") == 0
        assert second_proxy.sent("data/1/rank1") >= LARGE
    store = _open(s3.server(), prefix)
    assert [store.size(key) for key in store.list("data/")] == [LARGE] * 3


def test_a_completed_upload_whose_answer_was_lost_is_done(proxy: Proxy) -> None:
    proxy.rule = lambda request: (
        Fault(forward=True) if request.method == "POST" and "uploadId" in request.query else None
    )
    store = _open(proxy.address, timeout=5, retries=1)
    store.create("data/1/blob", bytes(LARGE))
    assert store.size("data/1/blob") == LARGE


def test_checksums_that_a_killed_uploader_left_are_swept(proxy: Proxy) -> None:
    """Killed between checksum and completion: nothing can be listed, the sweep finds it."""
    proxy.rule = lambda request: (
        Fault(500) if request.method == "POST" and "uploadId" in request.query else None
    )
    store = _open(proxy.address, timeout=20, retries=1)
    with pytest.raises(StoreError):
        store.create("data/1/blob", bytes(LARGE))
    proxy.rule = lambda request: None
    assert store.list("") == []
    assert store.sweep("data/", keep="data/1/") == 0
    assert store.sweep("data/") == 1
    assert store.sweep("data/") == 0


# --- the journal -----------------------------------------------------------------------------
def _step(step: int) -> StepDone:
    return StepDone(1.0, 10, 0.5, 1e-3, 0.1, step=step)


def _steps(store: BucketStore) -> list[int]:
    return [record.event.step for record in read_journal(store)]


def test_a_journal_is_written_followed_and_continued_by_the_next_process() -> None:
    prefix = secrets.token_hex(8)
    store = _open(s3.server(), prefix)
    follower = JournalTail(store)
    first = JournalWriter(store, "agent", 1)
    for step in range(1, 25):
        first.emit(_step(step))
        first.flush(sync=step % 2 == 0)
    assert [r.event.step for r in follower.read_new()] == list(range(1, 25))
    assert store.list("journal/") == [segment_key(1, "agent")]
    second = JournalWriter(_open(s3.server(), prefix), "agent", 1)
    second.emit(_step(25))
    second.flush()
    first.emit(_step(26))  # does not know yet that it has been replaced: nothing is lost
    first.flush()
    assert [r.event.step for r in follower.read_new()] == [25, 26]
    assert _steps(store) == list(range(1, 27))
    assert store.size(segment_key(1, "agent")) == len(store.get(segment_key(1, "agent")))
    with pytest.raises(AlreadyExistsError):
        store.create(segment_key(1, "agent"), b"")
    store.delete(segment_key(1, "agent"))
    assert store.list("") == []


@pytest.mark.parametrize("arrives", [True, False])
def test_an_append_that_failed_is_stored_once_when_it_is_tried_again(
    proxy: Proxy, arrives: bool
) -> None:
    store = _open(proxy.address, timeout=5, retries=0)
    writer = JournalWriter(store, "rank0", 1)
    writer.emit(_step(1))
    writer.flush()
    writer.emit(_step(2))
    proxy.rule = lambda request: Fault(503, "SlowDown", forward=arrives)
    with pytest.raises(StoreError, match="503 SlowDown"):
        writer.flush()
    proxy.rule = lambda request: None
    writer.emit(_step(3))
    writer.flush()
    assert _steps(store) == [1, 2, 3]


# --- failures --------------------------------------------------------------------------------
USES: dict[str, Callable[[BucketStore], object]] = {
    "create": lambda store: store.create("a/new", b"x"),
    "large": lambda store: store.create("a/large", bytes(LARGE)),
    "get": lambda store: store.get("a/there"),
    "range": lambda store: store.read_into("a/there", 1, memoryview(bytearray(5))),
    "list": lambda store: store.list("a/"),
    "size": lambda store: store.size("a/there"),
    "append": lambda store: store.append("journal/1.jsonl", b"x\n"),
    "delete": lambda store: store.delete("a/there"),
}


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Fault(500), "answers with an error"),
        (Fault(), "broke off in the middle"),
        (None, "does not answer in time"),
    ],
    ids=["errors", "dropped", "silent"],
)
@pytest.mark.parametrize("use", USES)
def test_a_failing_endpoint_is_one_sentence_within_a_bound(
    proxy: Proxy, use: str, fault: Fault | None, said: str
) -> None:
    prefix = secrets.token_hex(8)
    _open(s3.server(), prefix).create("a/there", b"0123456789")
    store = _open(proxy.address, prefix, timeout=0.4, retries=1)

    def rule(request: Request) -> Fault | None:
        if fault is None:
            proxy.closing.wait(120)
        return fault

    proxy.rule = rule
    caught: list[BaseException] = []

    def call() -> None:
        try:
            USES[use](store)
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(30)  # 0.4 s a request, asked once more, two requests at most: and much slack
    assert caught, "still waiting"
    (error,) = caught
    assert isinstance(error, StoreError), repr(error)
    text = str(error)
    assert re.search(said, text), text
    assert "\n" not in text
    assert text.startswith(f"{store.where}: ")
    assert s3.CREDENTIALS["AWS_SECRET_ACCESS_KEY"] not in text


def test_an_answer_that_breaks_off_is_asked_for_again(proxy: Proxy) -> None:
    content = secrets.token_bytes(MIB)
    store = _open(proxy.address)
    store.create("a", content)
    broken: list[Request] = []

    def rule(request: Request) -> Fault | None:
        if request.method == "GET" and len(broken) < 2:
            broken.append(request)
            return Fault(after=1000, forward=True)
        return None

    proxy.rule = rule
    assert store.get("a") == content
    assert len(broken) == 2


def test_an_answer_that_stops_in_the_middle_ends_in_time(proxy: Proxy) -> None:
    store = _open(proxy.address, **QUICK)
    store.create("a", bytes(MIB))
    proxy.rule = lambda request: Fault(after=1000, forward=True, hold=True)
    for use in (store.get, lambda key: store.read_into(key, 5, memoryview(bytearray(9000)))):
        with pytest.raises(StoreError, match=r"does not answer in time|broke off"):
            use("a")


def test_a_slow_endpoint_is_waited_for(proxy: Proxy) -> None:
    def rule(request: Request) -> Fault | None:
        proxy.closing.wait(0.2)
        return None

    proxy.rule = rule
    store = _open(proxy.address, timeout=5, retries=0)
    content = secrets.token_bytes(LARGE)
    store.create("data/1/blob", iter([content]))
    assert store.get("data/1/blob") == content


def test_nobody_listens_at_the_endpoint() -> None:
    with s3.proxied() as proxy:
        address = proxy.address
    store = _open(address, **QUICK)
    with pytest.raises(StoreError, match=r"the endpoint http://127\.0\.0\.1:\d+ cannot be reached"):
        store.get("a")


def test_an_encrypted_endpoint_is_trusted_by_its_authority_only(tmp_path: Path) -> None:
    authority, context = s3.certificates(tmp_path)
    with s3.proxied(context) as proxy:
        endpoint = f"https://127.0.0.1:{proxy.address[1]}"
        options = {"endpoint": endpoint, "allow_http": "false"} | QUICK
        store = _open(proxy.address, ca=authority, **(options | {"timeout": 10}))
        store.create("a", bytes(LARGE))
        assert store.size("a") == LARGE
        with pytest.raises(StoreError, match=r"certificate is not trusted; .*\?ca=<path>"):
            _open(proxy.address, **options).get("a")
        plain = _open(proxy.address, **(options | {"endpoint": f"https://{_plain()}"}))
        with pytest.raises(StoreError, match="does not speak TLS"):
            plain.get("a")


def _plain() -> str:
    host, port = s3.server()
    return f"{host}:{port}"


def test_wrong_credentials_and_a_missing_bucket_are_one_sentence_each(tmp_path: Path) -> None:
    address = s3.server()
    assert s3.ask(address, "POST", "/moto-api/reset-auth", b"0") == 200  # ask for keys from now on
    try:
        store = _open(address)
        for use in (USES["create"], USES["get"], USES["list"]):
            with pytest.raises(StoreError, match="refuses these credentials") as caught:
                use(store)
            assert "credentials=<path>" in str(caught.value)
    finally:
        assert s3.ask(address, "POST", "/moto-api/reset-auth", b"inf") == 200
    missing = s3.location(address).replace(f"s3://{s3.BUCKET}/", "s3://not-there/")
    store_without = open_store(missing)
    for use in (USES["create"], USES["get"], USES["list"], USES["large"], USES["append"]):
        with pytest.raises(StoreError, match="there is no such bucket"):
            use(store_without)  # type: ignore[arg-type]


def test_a_missing_key_is_not_a_missing_bucket() -> None:
    store = _open(s3.server())
    for key in ("a", "NoSuchBucket/Container"):
        with pytest.raises(MissingKeyError, match=f"there is no {key} in s3://runs/"):
            store.get(key)


def test_only_journal_segments_can_be_appended_to() -> None:
    with pytest.raises(ValueError, match="not a journal segment"):
        _open(s3.server()).append("terms/1.json", b"x")


def test_keys_that_the_environment_lacks_come_from_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in s3.CREDENTIALS:
        monkeypatch.delenv(name)
    path = tmp_path / "credentials"
    path.write_text("[other]\naws_access_key_id = k\naws_secret_access_key = s%%\n")
    path.chmod(0o600)
    store = _open(s3.server(), credentials=path, profile="other")
    store.create("a", b"x")
    with pytest.raises(StoreError, match="no credentials of the profile default"):
        _open(s3.server(), credentials=path)
    path.chmod(0o644)
    with pytest.raises(StoreError, match="other users of this machine can read"):
        _open(s3.server(), credentials=path, profile="other")
    assert os.environ.get("AWS_ACCESS_KEY_ID") is None
