"""What the newest checkpoint of a run holds, byte by byte."""

from __future__ import annotations

from pathlib import Path

from holdfast.checkpoint.restore.catalog import list_commits
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.core.sharding.boxes import whole_box
from holdfast.wire.store.run_store import FolderStore, RunStore


def newest_tensors(folder: Path, step: int) -> dict[str, bytes]:
    """Every tensor of the newest checkpoint in a run folder, which must be that of `step`."""
    return tensors_of(FolderStore(folder), step)


def tensors_of(store: RunStore, step: int) -> dict[str, bytes]:
    """The same, of any run store."""
    checkpoint = Checkpoint.open(store, list_commits(store)[0])
    assert checkpoint.step == step
    found = {}
    for spec in checkpoint.tensors:
        out = bytearray(spec.nbytes)
        checkpoint.read(whole_box(spec.name, spec.shape), memoryview(out))
        found[spec.name] = bytes(out)
    return found
