"""Saving through a real mover process: what is committed is what was captured, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from holdfast.checkpoint.restore import Checkpoint, listing, newest_verified, verify
from holdfast.spec.state import local_boxes
from tests.checkpoint.support import (
    TABLE,
    Mover,
    Workers,
    assert_holds,
    read_box,
    state,
    topology,
)


@pytest.mark.parametrize(("replicas", "dp_shard"), [(1, 1), (4, 1), (1, 3), (2, 2)])
def test_committed_state_is_bit_equal_on_every_layout(
    start: Callable[..., Mover], replicas: int, dp_shard: int
) -> None:
    mover = start()
    topo = topology(replicas, dp_shard)
    workers = Workers(mover.begin(topo), topo)
    workers.commit(7)
    checkpoint = newest_verified(mover.store)
    assert checkpoint is not None
    assert_holds(checkpoint, 7)
    assert checkpoint.commit.meta == {"position": 112}
    assert verify(mover.store, checkpoint.commit.key) == []
    # Nothing is stored twice: data bytes are those of one copy of the state.
    data = sum(w.blob.size - w.blob.data_start for w in checkpoint.commit.writers)
    assert data == sum(spec.nbytes for spec in TABLE)
