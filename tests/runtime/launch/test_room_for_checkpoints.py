"""A start compares the disk's room with the checkpoints that are to be kept."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast.config.loading.load import load_config
from holdfast.core.sharding.run_table import run_state_table
from holdfast.errors import OutOfSpaceError
from holdfast.launch.local import check_room
from holdfast.wire.store.run_store import FolderStore
from tests.support.memory_store import MemoryStore


@pytest.mark.parametrize(
    ("fits", "words"),
    [(4, ""), (3, "an older one goes"), (2, "use checkpoint.keep_last=2"), (1, "no second one")],
)
def test_too_little_room_is_said_with_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fits: int, words: str
) -> None:
    config = load_config(None, ["model.preset=tiny", "checkpoint.keep_last=3"]).config
    size = sum(spec.nbytes for spec in run_state_table(config))
    store, said = FolderStore(tmp_path), list[str]()
    store.create("data/1/1-rank0-0.safetensors", b"x" * 1000)  # counts as room: it may go
    free = [fits * size - 1000]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free[0]))
    check_room(store, config, said.append)
    assert bool(said) == bool(words)
    assert not words or (words in said[0] and "checkpoint.keep_last=3 needs room for 4" in said[0])
    free[0] = 10
    with pytest.raises(OutOfSpaceError, match="a checkpoint takes"):
        check_room(store, config, said.append)
    check_room(MemoryStore(), config, said.append)  # a bucket does not say how much is free
