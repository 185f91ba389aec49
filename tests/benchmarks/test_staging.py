"""The staging benchmark: its storage keeps what it is given, its arithmetic, and that it runs."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.lab.acute import verdicts
from benchmarks.runtime.staging.storage import CHUNK, NetworkStore, Sink, Storage, _Server
from benchmarks.runtime.staging.ways import DEFAULT, KEPT, NODE, OURS
from benchmarks.runtime.staging.whole import summary

from holdfast.events import (
    CheckpointCaptured,
    CheckpointCommitted,
    Event,
    Record,
    RunStopped,
    SnapshotKept,
    StepDone,
)
from holdfast.wire.store.run_store import AlreadyExistsError, MissingKeyError
from tests.support.commands import apart


@pytest.fixture
def storage() -> Iterator[Storage]:
    with _Server(1e12) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        host, port = server.server_address[:2]
        yield Storage(f"{host!s}:{port}")
        server.shutdown()
        thread.join()


def test_the_storage_keeps_what_was_sent(storage: Storage) -> None:
    content = os.urandom(CHUNK + 12_345)
    assert storage.put("a/one", [content[:1000], memoryview(content)[1000:]]) == len(content)
    storage.rename("a/one", "a/two")
    assert (storage.size("a/one"), storage.size("a/two")) == (-1, len(content))
    for start, stop in ((0, 10), (CHUNK - 5, CHUNK + 5), (0, len(content)), (CHUNK, CHUNK + 1)):
        assert storage.get("a/two", start, stop) == content[start:stop]
    storage.delete("a/")
    assert storage.size("a/two") == -1
    with Sink(storage, "b") as sink:  # into the chunks that came free
        sink.write(content[:7])
        assert sink.tell() == 7
    assert storage.get("b", 0, 100) == content[:7]


def test_blobs_lie_in_the_storage_and_the_rest_in_a_folder(
    storage: Storage, tmp_path: Path
) -> None:
    store = NetworkStore(str(tmp_path), storage)
    key = "data/x-0.safetensors"
    store.create("parts/x", b"small")
    store.create(key, [b"large", b"r"])
    assert store.list("data/") == [key]
    assert (store.size(key), store.size("parts/x")) == (6, 5)
    out = bytearray(4)
    store.read_into(key, 2, memoryview(out))
    assert out == b"rger"
    with pytest.raises(AlreadyExistsError):
        store.create(key, b"another")
    store.delete(key)
    with pytest.raises(MissingKeyError):
        store.size(key)
    assert storage.size(key) == -1


def _row(outside: float, pause: float) -> dict[str, Any]:
    return {"saves": [{"outside": outside, "pause": pause}] * 2}


def test_the_bars_are_those_of_the_best_baseline() -> None:
    rows = {DEFAULT: _row(8.0, 2.0), KEPT: _row(9.0, 0.1), OURS: _row(3.0, 0.02)}
    found = verdicts(rows)
    assert [line.rsplit(" ", 1)[1] for line in found] == ["yes", "yes"]
    assert DEFAULT in found[0]  # the shorter time
    assert KEPT in found[1]  # the shorter pause
    rows |= {OURS: _row(3.3, 0.026), NODE: _row(3.0, 0.1)}
    found = verdicts(rows)
    assert [line.rsplit(" ", 1)[1] for line in found[:2]] == ["NO", "NO"]
    assert "-10.0 % shorter" in found[2]


def test_the_blocked_share_is_of_the_saves_while_training() -> None:
    events: list[tuple[float, Event]] = [
        (100.0, StepDone(2.0, 7, 1.0, 1e-3, 1.0, step=1)),
        (101.0, CheckpointCaptured(0, 0.002, 1000, step=1)),
        (103.0, SnapshotKept("stage", 1000, 0.5, step=1)),
        (104.0, CheckpointCommitted("k", 1000, 2.0, step=1)),
        (150.0, StepDone(2.0, 7, 1.0, 1e-3, 3.0, step=2)),
        (151.0, CheckpointCaptured(0, 0.004, 1000, step=2)),
        (200.0, StepDone(2.0, 7, 1.0, 1e-3, 1.0, step=3)),
        (201.0, CheckpointCaptured(0, 0.3, 1000, step=3)),
        (202.0, RunStopped("SIGINT", step=3)),
    ]
    found = summary([Record(1, "a", n, time, event) for n, (time, event) in enumerate(events)])
    assert (found["saves"], found["wall"], found["leaving"]) == (2, 100.0, [0.3])
    assert found["blocked"] == pytest.approx(0.006)
    assert found["share"] == pytest.approx(0.00006)
    assert found["longest"] == 0.004


@pytest.mark.slow
def test_staging_is_measured(tmp_path: Path) -> None:
    """Real processes, a little state: the baseline and ours end with a row each, and a bar."""
    asked = ("--quick", "--ways", KEPT, OURS, "--folder", tmp_path)
    out = apart(*asked, module="benchmarks.lab.acute", deadline=300).succeeds().out
    assert "failed" not in out, out
    rows = [line for line in out.splitlines() if line.startswith((KEPT, OURS))]
    assert len(rows) == 2
    assert "trainer" in rows[1]
    assert "mover" in rows[1]
    assert list(tmp_path.iterdir()) == []
