"""A copy lease keeps two different checkpoints of one step apart, and ends with its holder."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.checkpoint.bucket.copy import copy_checkpoint
from holdfast.checkpoint.bucket.copy_lease import CopyLease, LeaseHeldError
from holdfast.checkpoint.format.save_context import SaveContext
from holdfast.checkpoint.restore.catalog import list_commits
from holdfast.checkpoint.restore.verify import verify
from holdfast.checkpoint.save.writer import try_commit
from holdfast.core.format.manifest import Commit, commit_key, part_prefix
from holdfast.core.sharding.state_table import TensorSpec
from holdfast.errors import CheckpointError, HoldfastError
from holdfast.layout import Layout, place_layout
from holdfast.wire.store.run_store import Buffer, FolderStore, RunStore
from holdfast.wire.term import create_generation
from tests.support.memory_store import MemoryStore
from tests.support.mover_process import write_noise
from tests.support.ranks import DEADLINE_S

TABLE = (TensorSpec("model.embed.weight", "F32", (37, 8), 0),)
KEY = commit_key(1, 5)
SHORT = 1.5
NEVER = 1e9
CLAIM = f"{part_prefix(1, 5)}claim"

KILLED = """
import sys
from holdfast.checkpoint.bucket.copy import copy_checkpoint
from holdfast.wire.store.run_store import FolderStore
from tests.support.killed_store import Killing
source, target, key, point = sys.argv[1:]
copy_checkpoint(FolderStore(source), key, Killing(target, int(point)))
"""


def save(store: RunStore, seed: int) -> Commit:
    """Step 5 of a generation 1; another one for each seed, of the same size."""
    topo = place_layout(Layout(dp_shard=2), 1, ("n", "n"))
    plan = SaveContext(1, topo, TABLE, "c", "d", extent_bytes=256)
    create_generation(store, 1, {})
    for rank in range(2):
        write_noise(store, plan, 5, rank, seed)
    commit = try_commit(store, plan, 5)
    assert commit is not None
    return commit


@pytest.fixture
def stores(tmp_path: Path) -> list[FolderStore]:
    """Two machines that each have a step 5 of their own, and where they copy it to."""
    made = []
    for name in ("one", "other", "target"):
        (tmp_path / name).mkdir()
        made.append(FolderStore(tmp_path / name))
    assert save(made[0], 1).to_bytes() != save(made[1], 2).to_bytes()
    return made


def kill_a_copy(source: FolderStore, target: FolderStore, point: int = 4) -> None:
    """In the middle of its first blob, which is behind its claim."""
    words = [str(source.folder), str(target.folder), KEY, str(point)]
    done = subprocess.run([sys.executable, "-c", KILLED, *words], timeout=DEADLINE_S, check=False)
    assert done.returncode == -9
    assert target.list(CLAIM)
    assert list_commits(target) == []


def whole(target: RunStore, source: RunStore) -> bool:
    """The very checkpoint of the source lies there, and no claim any more."""
    assert verify(target, KEY) == []
    return target.get(KEY) == source.get(KEY) and not target.list(CLAIM)


def test_a_killed_copy_that_is_run_again_goes_on_at_once(stores: list[FolderStore]) -> None:
    one, _, target = stores
    kill_a_copy(one, target)
    copy_checkpoint(one, KEY, target, lease_expiry_s=NEVER, say=pytest.fail)
    assert whole(target, one)


def test_a_killed_copy_s_claim_is_taken_over(stores: list[FolderStore]) -> None:
    one, other, target = stores
    kill_a_copy(one, target)
    said: list[str] = []
    copy_checkpoint(other, KEY, target, lease_expiry_s=SHORT, say=said.append)
    assert whole(target, other)
    assert len(said) == 1
    assert "is being copied there (by " in said[0]
    with pytest.raises(CheckpointError, match="another checkpoint of step 5"):
        copy_checkpoint(one, KEY, target, lease_expiry_s=NEVER)


def test_a_claim_without_a_number_is_taken_over_too(stores: list[FolderStore]) -> None:
    one, _, target = stores
    target.create(CLAIM, b"0123456789abcdef")
    copy_checkpoint(one, KEY, target, lease_expiry_s=SHORT)
    assert whole(target, one)


class Held(FolderStore):
    """Stops in the first blob until it may continue; if `silent`, also in any later claim."""

    def __init__(self, folder: Path, silent: bool = False) -> None:
        super().__init__(folder)
        self.begun, self.go = threading.Event(), threading.Event()
        self._silent = silent

    def create(self, key: str, data: Buffer | Iterable[Buffer]) -> None:
        if key.startswith("data/") and not self.begun.is_set():
            self.begun.set()
            assert self.go.wait(DEADLINE_S)
        if self._silent and key.startswith(CLAIM) and self.list(CLAIM):
            assert self.go.wait(DEADLINE_S)
        super().create(key, data)


def test_whoever_lives_keeps_his_claim_however_slow_he_is(stores: list[FolderStore]) -> None:
    one, other, target = stores
    held = Held(target.folder)
    with ThreadPoolExecutor(1) as pool:
        copied = pool.submit(copy_checkpoint, one, KEY, held, lease_expiry_s=4 * SHORT)
        assert held.begun.wait(DEADLINE_S)
        with pytest.raises(LeaseHeldError, match="another checkpoint of step 5"):
            copy_checkpoint(other, KEY, target, lease_expiry_s=NEVER)  # ends by a sign of life
        held.go.set()
        assert copied.result(DEADLINE_S).copied_bytes > 0
    assert whole(target, one)


def test_who_was_stopped_and_taken_over_writes_nothing_more(stores: list[FolderStore]) -> None:
    one, other, target = stores
    held = Held(target.folder, silent=True)
    with ThreadPoolExecutor(1) as pool:
        copied = pool.submit(copy_checkpoint, one, KEY, held, lease_expiry_s=SHORT)
        assert held.begun.wait(DEADLINE_S)
        copy_checkpoint(other, KEY, target, lease_expiry_s=3 * SHORT)  # its own claim has to last
        held.go.set()
        with pytest.raises(HoldfastError):
            copied.result(DEADLINE_S)
    assert whole(target, other)


def test_of_two_who_take_over_at_once_one_wins(stores: list[FolderStore]) -> None:
    one, other, _ = stores

    class Together(MemoryStore):
        """Two create the number behind the abandoned one at the same time."""

        def __init__(self) -> None:
            super().__init__()
            self._meet = threading.Barrier(2)

        def create(self, key: str, data: Buffer | Iterable[Buffer]) -> None:
            if key == f"{CLAIM}-{2:08d}":
                self._meet.wait(DEADLINE_S)
            super().create(key, data)

    for _ in range(10):
        target = Together()
        target.create(f"{CLAIM}-{1:08d}", b"of a third")
        commits = [Commit.from_bytes(store.get(KEY), KEY) for store in (one, other)]
        claims = [CopyLease(target, c, str(n), 0.05) for n, c in enumerate(commits)]
        with ThreadPoolExecutor(2) as pool:
            ends = [
                future.exception(DEADLINE_S) for future in [pool.submit(c.acquire) for c in claims]
            ]
        assert sorted(type(end) for end in ends if end is not None) == [LeaseHeldError]
        claims[ends.index(None)].renew()
        assert len(target.list(CLAIM)) == 2  # the winner's; the abandoned one was removed
