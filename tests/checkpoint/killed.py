"""A process that saves steps and is killed in the middle: `python -m tests.checkpoint.killed`.

Arguments: run folder, point. Every change of the store is counted, once before it happens and
once after; at count `point` the process kills itself with SIGKILL. Prints what it committed.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable, Iterator

from holdfast.checkpoint import cleaning
from holdfast.checkpoint.blob import header
from holdfast.checkpoint.save import Plan, try_commit, write_part
from holdfast.layout import Layout, place
from holdfast.spec.boxes import Box
from holdfast.spec.manifest import placed
from holdfast.spec.ownership import owned_boxes
from holdfast.spec.state import TensorSpec
from holdfast.wire.runstore import Buffer, FolderStore
from holdfast.wire.runstore import chunks as flat

TABLE = (TensorSpec("w", "F32", (64, 8), 0), TensorSpec("b", "U8", (100,), None))
TOPOLOGY = place(Layout(dp_replicate=2), 1, ("n", "n"))
PLAN = Plan(1, TOPOLOGY, TABLE, "c", "d", 512)


def content(step: int, box: Box, nbytes: int) -> bytes:
    """The bytes of one box: element at global byte i is (i + 7 * step) % 251."""
    row = nbytes // box.lengths[0]
    first = box.offsets[0] * row
    return bytes((first + i + 7 * step) % 251 for i in range(nbytes))


class Killing(FolderStore):
    """A real folder, and a real kill at one point."""

    def __init__(self, folder: str, point: int) -> None:
        super().__init__(folder)
        self.left = point

    def pass_point(self) -> None:
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1

    def create(self, key: str, data: Buffer | Iterable[Buffer]) -> None:
        def watched() -> Iterator[Buffer]:
            for part in flat(data):
                half = len(part) // 2
                yield part[:half]
                self.pass_point()  # in the middle of the bytes
                yield part[half:]

        super().create(key, watched())
        self.pass_point()

    def delete(self, key: str) -> None:
        super().delete(key)
        self.pass_point()


def save(store: FolderStore, step: int) -> None:
    for rank in range(2):
        tensors = placed(owned_boxes(TOPOLOGY, TABLE, rank), TABLE)
        head = header(tensors)
        body = b"".join(content(step, p.box, p.nbytes) for p in tensors)
        write_part(store, PLAN, step, rank, [head + body], len(head), tensors, {"position": step})
    commit = try_commit(store, PLAN, step)
    assert commit is not None
    print(step, flush=True)
    cleaning.retain(store, cleaning.Keep(1), (), ())


if __name__ == "__main__":
    folder = Killing(sys.argv[1], int(sys.argv[2]))
    for number in (2, 3):
        save(folder, number)
