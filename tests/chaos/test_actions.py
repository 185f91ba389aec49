"""What is done to processes from outside is really done."""

from __future__ import annotations

import subprocess
import sys

from holdfast.chaos.actions import rot_memory

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
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        changed = rot_memory(process.pid)
        found, _ = process.communicate("\n", 30)
    assert changed == int(found) == 9
