"""A kill at any point of a save leaves the previous checkpoint, or the new one, intact."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

from holdfast.checkpoint.restore.verify import find_newest_verified, verify
from holdfast.core.sharding.state_table import TensorSpec
from tests.support.mover_process import Mover, Workers, assert_holds, files, topology


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
