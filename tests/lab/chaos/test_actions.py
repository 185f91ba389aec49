"""What is done to processes from outside is really done."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.core.format.manifest import commit_key
from holdfast_lab.chaos.actions import (
    FAULT_ACTIONS,
    NotPossibleNowError,
    damage_newest,
    flip_memory_bits,
)
from holdfast_lab.chaos.catalog import FAULTS

SIZE = 100_000
HOLDS_MEMORY = f"""
import mmap, os
fd = os.memfd_create("state")
os.truncate(fd, {SIZE})
memory = mmap.mmap(fd, {SIZE})  # it has a descriptor of its own
print("ready", flush=True)
input()
print(sum(memory[:]))
"""


def test_memory_that_is_mapped_is_changed_and_each_bit_once() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS_MEMORY],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        changed = flip_memory_bits(process.pid)
        found, _ = process.communicate("\n", 30)
    assert changed == int(found) == 9


def test_only_the_newest_checkpoint_is_damaged(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "0000000001"
    folder.mkdir(parents=True)
    (tmp_path / "commits").mkdir()
    with pytest.raises(NotPossibleNowError, match="no older"):
        damage_newest(tmp_path, lambda file, older: None)
    for step in (10, 20):
        (tmp_path / commit_key(1, step)).write_text("")
        for rank in (0, 1):
            (folder / f"{step:010d}-rank{rank:05d}-0.safetensors").write_text(f"{step}/{rank}")
    pairs: list[tuple[str, str]] = []
    key = damage_newest(
        tmp_path, lambda file, older: pairs.append((file.read_text(), older.read_text()))
    )
    assert key == commit_key(1, 20)
    assert sorted(pairs) == [("20/0", "10/0"), ("20/1", "10/1")]
    assert set(FAULT_ACTIONS) <= {part.action for fault in FAULTS.values() for part in fault.parts}
