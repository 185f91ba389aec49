"""A kill at any point of a save leaves the previous checkpoint, or the new one, intact."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest

from holdfast.checkpoint.restore.verify import find_newest_verified, verify
from holdfast.checkpoint.save.writer import write_part
from holdfast.core.format.manifest import commit_key
from holdfast.core.sharding.state_table import TensorSpec
from holdfast.wire.store.run_store import AlreadyExistsError, FolderStore
from holdfast.wire.term import create_generation
from tests.support.checkpoint_faults import states
from tests.support.checkpoint_faults.histories import history, plan
from tests.support.checkpoint_faults.verdict import compare
from tests.support.mover_process import (
    Start,
    Workers,
    assert_holds,
    files,
    newest_verified,
    topology,
)
from tests.support.ranks import RankContext, run_ranks


def test_a_mover_killed_at_seeded_moments_never_breaks_the_newest(
    start: Start,
) -> None:
    """SIGKILL while four ranks' blobs are being written, at ten moments of one run."""
    table = (TensorSpec("w", "F32", (4096, 64), 0), TensorSpec("v", "F32", (300, 7), 0))
    moments = random.Random(3)
    newest = 0
    interrupted = 0
    for generation in range(1, 11):
        mover = start(extent_bytes=65536, keep_last=2)
        topo = topology(4, generation=generation)
        client = mover.begin(topo, table)
        assert client.find_restore_point().step == newest
        workers = Workers(client, topo, table)
        step = newest + 1
        workers.save(step)
        # where in the save it is killed
        threading.Event().wait(moments.uniform(0, 0.03) if newest else 0)
        mover.kill()
        found = find_newest_verified(mover.store)
        after = found.step if found else 0
        assert after in (newest, step)
        interrupted += after == newest
        if found:
            assert_holds(found, after, table)
            assert verify(mover.store, found.commit.key) == []
        newest = after
    assert interrupted, files(mover.store)  # some of the kills must have hit a save


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


def test_a_crash_while_a_step_is_saved_again_destroys_nothing(tmp_path: Path) -> None:
    """Probe P4. In torch.distributed.checkpoint the older checkpoint is lost, and looks valid."""
    store = history(3, 3).pour(tmp_path / "run")
    (ended,) = run_ranks(crash_over, 1, {"folder": store.folder}, dies={0: "SIGKILL"})
    assert ended.exit == -signal.SIGKILL, ended.log
    found = newest_verified(store)
    assert found.commit.key == commit_key(2, 8)
    compare(found, states.topology(0, 4))
    assert verify(store, found.commit.key) == []
