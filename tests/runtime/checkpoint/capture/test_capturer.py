"""Captures in the background: the result is the state after its step, for any later training."""

from __future__ import annotations

import itertools
import signal
import threading
from typing import Any

import pytest
import torch

from holdfast.checkpoint.capture.capturer import Capturer, CompletedCapture, SkippedCapture
from holdfast.checkpoint.capture.chunked_copy import ChunkedCopy, CopyTiming
from holdfast.checkpoint.memory.arena import Arena
from holdfast.checkpoint.mover.client import MoverClient
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.core.format.manifest import commit_key
from holdfast.core.sharding.state_table import TensorSpec
from holdfast.errors import HoldfastError
from tests.support import killed_capture
from tests.support.mover_process import TABLE, Start, assert_holds, topology
from tests.support.ranks import DEADLINE_S, run_ranks


class Stalled(Capturer):
    """Its copying thread begins only when `go` is set."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.go = threading.Event()
        self._copy_threads.submit(self.go.wait, DEADLINE_S)


@pytest.mark.parametrize(("replicas", "dp_shard"), [(1, 1), (2, 1), (1, 3), (2, 2)])
def test_what_is_committed_is_the_state_before_the_next_change(
    start: Start, replicas: int, dp_shard: int
) -> None:
    mover = start()
    workers = mover.workers(replicas, dp_shard)
    for step in (1, 2, 3):
        workers.compute(step)
        for capturer in workers.capturers:
            assert isinstance(capturer.begin(step, wait=DEADLINE_S), ChunkedCopy)
        for capturer in workers.capturers:
            capturer.fence()
        workers.compute(step + 1)  # the next update
        for capturer in workers.capturers:
            assert capturer.announce(step, {"position": 16 * step}) is None
    for step in (1, 2, 3):
        assert workers.capturers[0].wait_until_committed(step, DEADLINE_S) is None
        assert_holds(Checkpoint.open(mover.store, commit_key(1, step)), step)


def test_no_snapshot_is_torn_in_a_storm_of_steps(start: Start) -> None:
    """Every step changes every byte and is captured. A reader of the arena sees one step's bytes
    under a header, or no header."""
    mover = start()
    table = tuple(TensorSpec(f"t{i}", "F32", (257 * (i % 7 + 1),), 0) for i in range(300))
    topo = topology()
    client = mover.begin(topo, table)
    tensors = {spec.name: torch.zeros(spec.shape) for spec in table}
    capturer = Capturer(client, topo, table, 0, tensors, run="test", slots=3)
    arena = capturer._arena
    start_of_data, stop = len(capturer._header), threading.Event()
    seen: set[int] = set()
    torn: list[int] = []

    def look() -> None:
        for slot in itertools.cycle(range(arena.slots)):
            if stop.is_set():
                return
            header = arena.header(slot)
            if header is None:
                continue
            data = bytes(arena.data(slot, header.length)[start_of_data:])
            if arena.header(slot) != header:
                continue
            values = torch.frombuffer(bytearray(data), dtype=torch.float32)
            seen.add(header.step)
            if not bool((values == header.step).all()):
                torn.append(header.step)

    looker = threading.Thread(target=look)
    looker.start()
    try:
        for step in range(1, 150):
            assert capturer.fence() >= 0
            for tensor in tensors.values():
                tensor.fill_(step)
            assert isinstance(capturer.begin(step), ChunkedCopy)
            if step > 1:
                capturer.drop_capture(step - 1)  # as a mover does that keeps it in memory
    finally:
        capturer.fence()
        stop.set()
        looker.join(DEADLINE_S)
    assert torn == []
    assert len(seen) > 5


def test_a_thread_that_gets_no_core_delays_nobody(start: Start) -> None:
    """The fence copies what is left, and counts the seconds."""
    mover = start()
    workers = mover.workers()
    (tensors,) = workers.tensors
    capturer = Stalled(workers.client, workers.topology, TABLE, 0, tensors, run="test")
    workers.compute(1)
    costs: list[CopyTiming] = []
    assert isinstance(capturer.begin(1), ChunkedCopy)
    capturer.call_when_copied(1, costs.append)
    assert costs == []
    assert capturer.fence() > 0
    assert [cost.fence_s > 0 and cost.blocked_s >= cost.fence_s for cost in costs] == [True]
    workers.compute(2)
    capturer.go.set()
    assert capturer.announce(1, {}) is None
    assert capturer.wait_until_committed(1, DEADLINE_S) is None
    assert_holds(Checkpoint.open(mover.store, commit_key(1, 1)), 1)
    capturer.close()


def test_the_next_capture_and_leaving_wait_for_the_present_one(start: Start) -> None:
    mover = start()
    workers = mover.workers()
    capturer = Stalled(workers.client, workers.topology, TABLE, 0, workers.tensors[0], run="test")
    ended: list[int] = []
    for step in (1, 2):
        workers.compute(step)
        assert isinstance(capturer.begin(step), ChunkedCopy)
        capturer.call_when_copied(step, lambda cost, step=step: ended.append(step))
    assert ended == [1]
    capturer.go.set()
    capturer.close()
    assert ended == [1, 2]
    for step in (1, 2):
        assert capturer.announce(step, {}) is None
    assert capturer.wait_until_committed(2, DEADLINE_S) is None
    assert_holds(Checkpoint.open(mover.store, commit_key(1, 2)), 2)


def test_a_copy_that_fails_is_one_skipped_save(start: Start) -> None:
    (capturer,) = start().workers().capturers

    class Broken:
        def data_ptr(self) -> int:
            return 0

    whole = capturer._copy_plan.spans
    capturer._copy_plan.spans = [
        [span._replace(source=Broken()) for span in piece] for piece in whole
    ]
    assert isinstance(capturer.begin(1), ChunkedCopy)
    capturer.fence()
    answer = capturer.announce(1, {})
    assert isinstance(answer, SkippedCapture)
    assert answer.reason == "the copy failed: a tensor has no memory any more"
    capturer._copy_plan.spans = whole
    for step in (2, 3):  # both slots are free
        assert isinstance(capturer.capture(step), CompletedCapture)


def test_the_newest_snapshot_that_the_mover_knows_is_not_overwritten_before_a_newer_one(
    start: Start,
) -> None:
    mover = start()
    workers = mover.workers()
    (capturer,) = workers.capturers
    workers.commit(1)
    assert capturer._arena.free_slot() is not None
    kept = next(s for s in range(2) if (h := capturer._arena.header(s)) and h.step == 1)
    for step in range(2, 6):  # given up one after the other: never known to the mover
        assert isinstance(capturer.capture(step), CompletedCapture)
        assert not capturer.has_free_slot()
        assert isinstance(capturer.capture(99), SkippedCapture)
        capturer.drop_capture(step)
        header = capturer._arena.header(kept)
        assert header is not None
        assert header.step == 1
    workers.commit(6)
    assert isinstance(capturer.capture(7), CompletedCapture)  # over step 1
    assert capturer._arena.header(kept).step == 7  # type: ignore[union-attr]


def test_a_refused_announcement_keeps_the_snapshot_before(start: Start) -> None:
    mover = start()
    workers = mover.workers()
    (capturer,) = workers.capturers
    workers.commit(1)

    class Refusing(MoverClient):
        def announce_capture(self, *args: Any, **kwargs: Any) -> None:
            raise HoldfastError("the toy refuses")

    good = capturer._mover
    capturer._mover = Refusing(mover.socket, mover.secret, 1)
    assert isinstance(capturer.capture(2), CompletedCapture)
    assert capturer.announce(2, {}) == SkippedCapture(2, "the toy refuses")
    capturer._mover = good
    workers.commit(3)


def test_sigkill_in_the_middle_of_a_hidden_copy_leaves_the_other_slot_whole(start: Start) -> None:
    mover = start(extent_bytes=2**20)
    for generation in itertools.count(1):
        point = generation - 1
        topo = topology(generation=generation)
        client = mover.begin(topo, killed_capture.TABLE)
        arguments = {"socket": mover.socket, "secret": mover.secret.hex()}
        (done,) = run_ranks(
            killed_capture.die_while_copying,
            1,
            {**arguments, "generation": generation, "point": point},
            dies={0: "SIGKILL"},
        )
        again = {name: torch.zeros(n) for name, n in (("w", killed_capture.ROWS), ("b", 7))}
        capturer = Capturer(client, topo, killed_capture.TABLE, 0, again, run="test")
        arena: Arena = capturer._arena
        headers = [arena.header(slot) for slot in range(2)]
        one = next(slot for slot, header in enumerate(headers) if header and header.step == 1)
        due = dict(again)
        killed_capture.fill(due, 1)
        for piece in capturer._copy_plan.spans:
            for span in piece:
                at = arena.data_offset(one) + span.target_offset
                held = arena.memory[at : at + span.length]
                source = next(t for t in due.values() if t.data_ptr() == span.source.data_ptr())
                assert (
                    held
                    == source.numpy().tobytes()[
                        span.source_offset : span.source_offset + span.length
                    ]
                )
        if done.exit == 0:
            assert done.value == point >= 3
            assert headers[1 - one] is not None
            return
        assert done.exit == -signal.SIGKILL, done.log
        assert headers[1 - one] is None
