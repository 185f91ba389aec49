"""A kill at any point of a save leaves the previous checkpoint, or the new one, intact."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from holdfast.checkpoint.restore.catalog import list_commits
from holdfast.checkpoint.restore.verify import find_newest_verified, verify
from holdfast.checkpoint.save import retention
from holdfast.core.sharding.boxes import whole_box
from holdfast.core.sharding.state_table import TensorSpec
from holdfast.wire.store.run_store import FolderStore
from tests.support import killed_saver as killed
from tests.support.mover_process import Mover, Workers, assert_holds, files, topology


def test_kill_at_every_point_of_the_protocol(tmp_path: Path) -> None:
    """Each create (in the middle of its bytes, and after) and each delete is a point."""
    driver = subprocess.run(
        [sys.executable, "-m", "tests.support.killed_saver", str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    ends = [json.loads(line) for line in driver.stdout.splitlines()]
    assert len(ends) > 20
    assert [code for _, code, _ in ends] == [-signal.SIGKILL] * (len(ends) - 1) + [0]
    reached: set[int] = set()
    for point, _, said in ends:
        store = FolderStore(tmp_path / str(point))
        found = find_newest_verified(store)
        assert found is not None
        # Each step reported as committed is there, and each one there is intact.
        known = max(said, default=1)
        assert found.step in {known, known + 1}
        reached.add(found.step)
        for spec in killed.TABLE:
            box = whole_box(spec.name, spec.shape)
            out = bytearray(spec.nbytes)
            found.read(box, memoryview(out))
            assert bytes(out) == killed.content(found.step, box, spec.nbytes)
        # The next generation sweeps what the kill left; only complete checkpoints stay.
        retention.sweep_older_generations(store, 2)
        assert all(verify(store, key) == [] for key in list_commits(store))
        kept = [key for key in store.list("") if key.startswith(("data/", "parts/"))]
        assert len(kept) == 4 * len(list_commits(store))
        assert not [name for name in files(store) if ".tmp" in name]
    assert reached == {1, 2, 3}


def test_a_mover_killed_at_seeded_moments_never_breaks_the_newest(
    start: Callable[..., Mover],
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
