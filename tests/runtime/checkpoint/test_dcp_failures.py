"""The silent failures that were reproduced in torch.distributed.checkpoint 2.13, one test each:
what the same fault does here. None is silent; most cannot happen.

P1 a buffer that is being saved is used again       P4 a save over an older one crashes
P2 a writer thread's exception is lost              P5 one of several files is missing
P3 one bit of the payload flips                     P6 one descriptor per tensor (loud there)
"""

from __future__ import annotations

import os
import random
import resource
import signal
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.checkpoint.capture.capturer import CompletedCapture, SkippedCapture
from holdfast.checkpoint.mover.service import MoverService, MoverSettings
from holdfast.checkpoint.restore.catalog import list_commits
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.checkpoint.restore.verify import find_newest_verified, verify
from holdfast.checkpoint.save.writer import write_part
from holdfast.core.format.manifest import commit_key
from holdfast.core.sharding.boxes import whole_box
from holdfast.core.sharding.state_table import TensorSpec, local_boxes
from holdfast.errors import CheckpointError, CorruptError, HoldfastError, OutOfSpaceError
from holdfast.events import CheckpointFailed
from holdfast.wire.store.run_store import AlreadyExistsError, Buffer, FolderStore, byte_views
from holdfast.wire.term import create_generation
from tests.support.checkpoint_faults import states
from tests.support.checkpoint_faults.histories import EXTENT_BYTES, history, plan
from tests.support.checkpoint_faults.movers import Ranks
from tests.support.checkpoint_faults.verdict import compare
from tests.support.mover_process import Mover, Workers, read_box, topology
from tests.support.ranks import RankContext, rank_values, run_ranks

Start = Callable[..., Mover]


def test_p1_a_buffer_that_is_being_saved_is_not_used_again(start: Start) -> None:
    """There: the first checkpoint holds the second one's values, and both succeed."""
    table = (TensorSpec("w", "F32", (2048, 1024), 0),)  # 8 MiB
    mover = start(extent_bytes=2**20)
    topo = topology()
    workers = Workers(mover.begin(topo, table), topo, table)
    (capturer,), (tensors,) = workers.capturers, workers.tensors
    tensors["w"].fill_(1.0)
    assert isinstance(capturer.capture(1), CompletedCapture)
    assert capturer.announce(1, {}) is None
    mover.process.send_signal(signal.SIGSTOP)  # in the middle of it, more often than not
    tensors["w"].fill_(2.0)
    assert isinstance(capturer.capture(2), CompletedCapture)
    tensors["w"].fill_(3.0)
    third = capturer.capture(3)
    tensors["w"].fill_(4.0)
    mover.process.send_signal(signal.SIGCONT)
    assert capturer.announce(2, {}) is None
    if isinstance(third, CompletedCapture):  # the first save had ended before the mover was stopped
        assert capturer.announce(3, {}) is None
    else:
        assert isinstance(third, SkippedCapture)
    for step in (1, 2, 3) if isinstance(third, CompletedCapture) else (1, 2):
        assert capturer.wait_until_committed(step, 60) is None
        saved = read_box(
            Checkpoint.open(mover.store, commit_key(1, step)), whole_box("w", (2048, 1024))
        )
        assert torch.equal(saved, torch.full_like(saved, float(step)))


class Direct:
    """A service's requests without a socket."""

    def __init__(self, service: MoverService, generation: int) -> None:
        self.service, self.generation = service, generation

    def get_arena(self, rank: int, blob_bytes: int, slots: int) -> int:
        return self.service.get_arena(self.generation, rank, blob_bytes, slots)

    def wait_for_free_slot(self, rank: int, timeout: float) -> bool:
        return self.service.wait_for_free_slot(self.generation, rank, timeout)

    def announce_capture(
        self, rank: int, step: int, slot: int, sequence: int, meta: Mapping[str, Any]
    ) -> None:
        self.service.accept_capture(self.generation, rank, step, slot, sequence, meta)

    def wait_until_committed(self, step: int, wait: float) -> str | None:
        return self.service.save_tracker.wait_until_ended((self.generation, step), wait)[1]


class FullFor(FolderStore):
    """No space for what `rank` writes of `step`, after its first hundred bytes."""

    def __init__(self, folder: Path, victim: str) -> None:
        super().__init__(folder)
        self._victim = victim

    def create(self, key: str, data: Buffer | Iterable[Buffer]) -> None:
        def some() -> Iterable[Buffer]:
            for part in byte_views(data):
                yield part[:100]
                raise OutOfSpaceError("the disk is full")

        super().create(key, some() if self._victim in key else data)


def test_p2_an_exception_of_a_writer_is_never_lost(tmp_path: Path) -> None:
    """There: the save returns and commits, and the load fails later."""
    store = FullFor(tmp_path, "data/0000000001/0000000002-rank00001")
    service = MoverService(store, MoverSettings("campaign", "c", "d", extent_bytes=EXTENT_BYTES))
    topo = states.topology(3, 1)
    create_generation(store, 1, {})
    service.expect(1, topo, states.TABLE)
    ranks = Ranks(Direct(service, 1), topo)  # type: ignore[arg-type]
    assert ranks.save(1) is None
    assert "the disk is full" in (ranks.save(2) or "")
    assert ranks.save(3) is None
    assert list_commits(store) == [commit_key(1, 3), commit_key(1, 1)]
    events, _ = service.save_tracker.events_since(0, 0)
    assert [fields["step"] for kind, fields in events if kind == CheckpointFailed.kind] == [2]
    service.close()


def test_p3_one_bit_of_the_payload_is_seen(tmp_path: Path) -> None:
    """There: it loads, with one wrong element."""
    rng = random.Random(3)
    for number in range(24):
        store = history(3, 6).pour(tmp_path / str(number))
        checkpoint = Checkpoint.open(store, commit_key(2, 8))
        blob = rng.choice(checkpoint.commit.writers).blob
        path = store.folder / blob.key
        data = bytearray(path.read_bytes())
        data[rng.randrange(blob.data_start, len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        with pytest.raises(CorruptError, match="checksum does not match"):
            compare(checkpoint, states.topology(2, 3))
        found = find_newest_verified(store)
        assert found is not None
        assert found.step == 6
        compare(found, states.topology(2, 3))


def crash_over(ctx: RankContext, folder: Path) -> None:
    """Save step 8 once more, by every way there is, and die after a hundred bytes of it."""
    store = FolderStore(folder)
    made = plan(states.topology(3, 2))
    tensors = states.owned(made.topology, 0)
    data, start = states.blob(99, tensors)
    with pytest.raises(AlreadyExistsError):
        write_part(store, made, 8, 0, [data], start, tensors, {})
    with pytest.raises(AlreadyExistsError):
        store.create(commit_key(2, 8), b"{}")
    create_generation(store, 3, {})

    def dying() -> Iterable[bytes]:
        yield data[:100]
        os.kill(os.getpid(), signal.SIGKILL)

    write_part(store, plan(states.topology(3, 3)), 8, 0, dying(), start, tensors, {})


def test_p4_a_crash_while_a_step_is_saved_again_destroys_nothing(tmp_path: Path) -> None:
    """There: the older checkpoint is lost, and looks valid."""
    store = history(3, 3).pour(tmp_path / "run")
    (ended,) = run_ranks(crash_over, 1, {"folder": store.folder}, dies={0: "SIGKILL"})
    assert ended.exit == -signal.SIGKILL, ended.log
    found = find_newest_verified(store)
    assert found is not None
    assert found.commit.key == commit_key(2, 8)
    compare(found, states.topology(0, 4))
    assert verify(store, found.commit.key) == []


def test_p5_a_missing_file_leaves_nothing_uninitialised(tmp_path: Path) -> None:
    """There: the rows of the middle one of three files stay as they were."""
    store = history(2, 2).pour(tmp_path / "run")  # three shards
    newest = Checkpoint.open(store, commit_key(2, 8))
    (store.folder / newest.commit.writers[1].blob.key).unlink()
    boxes = [b for b in local_boxes(states.topology(0, 3), states.TABLE, 0) if b.size]
    refused = 0
    for box in boxes:
        out = bytearray(b"\xa5") * len(states.content(8, box))
        try:
            newest.read(box, memoryview(out))
        except HoldfastError:
            refused += 1
        else:
            assert bytes(out) == states.content(8, box)
    assert refused
    found = find_newest_verified(store)
    assert found is not None
    assert found.step == 6
    for writer in (
        w for key in list_commits(store) for w in Checkpoint.open(store, key).commit.writers
    ):
        with suppress(FileNotFoundError):
            if writer.rank == 1:
                (store.folder / writer.blob.key).unlink()
    with pytest.raises(CheckpointError, match="none of 4 checkpoints can be trusted"):
        find_newest_verified(store)


def many_tensors(ctx: RankContext, folder: Path) -> int:
    """1,500 tensors where 64 descriptors may be open, in the mover and in the worker."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    table = tuple(TensorSpec(f"t{i}", "F32", (3,), 0) for i in range(1500))
    mover = Mover(folder)
    try:
        topo = topology()
        Workers(mover.begin(topo, table), topo, table).commit(1)
    finally:
        mover.close()
    return len(os.listdir("/proc/self/fd"))


def test_p6_many_tensors_need_no_descriptors(tmp_path: Path) -> None:
    """There: "Too many open files"."""
    (tmp_path / "run").mkdir()
    (count,) = rank_values(many_tensors, 1, {"folder": tmp_path / "run"})
    assert count < 64
    found = find_newest_verified(FolderStore(tmp_path / "run"))
    assert found is not None
    assert found.step == 1
