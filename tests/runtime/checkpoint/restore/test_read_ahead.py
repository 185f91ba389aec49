"""Complete tensors in order: the same bits as box by box, for little more than their bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from holdfast.checkpoint.restore.catalog import list_commits
from holdfast.checkpoint.restore.read_ahead import ReadAhead
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.core.sharding.boxes import Box, whole_box
from holdfast.core.sharding.state_table import TensorSpec
from holdfast.errors import CorruptError
from tests.support.mover_process import TABLE, Start, Workers, state, topology


@pytest.mark.parametrize("budget", [1, 1200, 1 << 20])
def test_every_part_is_what_was_saved(start: Start, budget: int) -> None:
    mover = start()
    mover.workers(1, 3).commit(2)
    checkpoint = Checkpoint.open(mover.store, list_commits(mover.store)[0])
    ahead = ReadAhead(checkpoint, [spec.name for spec in TABLE], budget)
    for name, full in state(2).items():
        for box in parts(name, tuple(full.shape)):
            out = np.empty(box.size * full.element_size(), np.uint8)
            ahead.read(box, out.data)
            cut = tuple(slice(a, b) for a, b in zip(box.offsets, box.stops, strict=True))
            assert torch.equal(torch.from_numpy(out).view(full.dtype).view(box.lengths), full[cut])


def parts(name: str, shape: tuple[int, ...]) -> list[Box]:
    if not shape:
        return [whole_box(name, shape)]
    half = shape[0] // 2
    rest = shape[1:]
    zeros = (0,) * len(rest)
    return [
        Box(name, (0, *zeros), (half, *rest)),
        Box(name, (half, *zeros), (shape[0] - half, *rest)),
    ]


def test_a_sharded_checkpoint_is_read_once(start: Start) -> None:
    """40 tensors over 4 writers, in extents that hold a piece of ten of them."""
    table = tuple(TensorSpec(f"model.t{i}", "F32", (64, 16), 0) for i in range(40))
    mover = start(extent_bytes=10_240)
    topo = topology(1, 4)
    Workers(mover.begin(topo, table), topo, table).commit(1)
    key = list_commits(mover.store)[0]
    need = sum(spec.nbytes for spec in table)

    def cost(read: Callable[[Box, memoryview], None], checkpoint: Checkpoint) -> float:
        for spec in table:
            read(whole_box(spec.name, spec.shape), memoryview(bytearray(spec.nbytes)))
        return checkpoint.bytes_read / need

    plain = Checkpoint(mover.store, Checkpoint.open(mover.store, key).commit, cache_bytes=10_240)
    ahead = Checkpoint.open(mover.store, key)
    names = [spec.name for spec in table]
    # Two passes; headers, and the extents in which one pass ends and the next begins.
    assert cost(ReadAhead(ahead, names, need // 2).read, ahead) < 1.6
    assert cost(plain.read, plain) > 8, "what reading them one by one would cost"


def test_a_wrong_byte_is_an_error_and_nothing_is_kept(start: Start) -> None:
    mover = start()
    mover.workers().commit(1)
    blob = next((Path(mover.store.folder) / "data").rglob("*.safetensors"))
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.write_bytes(data)
    checkpoint = Checkpoint.open(mover.store, list_commits(mover.store)[0])
    ahead = ReadAhead(checkpoint, [spec.name for spec in TABLE])
    name = TABLE[0].name
    for _ in range(2):
        with pytest.raises(CorruptError, match="checksum"):
            ahead.read(whole_box(name, TABLE[0].shape), memoryview(bytearray(TABLE[0].nbytes)))
