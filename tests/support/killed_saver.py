"""Processes that save steps and are killed in the middle: `python -m tests.support.killed_saver
ROOT`.

Every change of the store is counted, in the middle of its bytes and when it is done. At count
`point` the process kills itself with SIGKILL. Prints [point, exit code, steps committed] for each.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from collections.abc import Iterable, Iterator

from holdfast.checkpoint.format.blob import blob_header
from holdfast.checkpoint.format.save_context import SaveContext
from holdfast.checkpoint.save import retention
from holdfast.checkpoint.save.writer import try_commit, write_part
from holdfast.core.format.manifest import place_boxes
from holdfast.core.sharding.boxes import Box
from holdfast.core.sharding.ownership import owned_boxes
from holdfast.core.sharding.state_table import TensorSpec
from holdfast.layout import Layout, place_layout
from holdfast.wire.store.run_store import Buffer, FolderStore
from holdfast.wire.store.run_store import byte_views as flat

TABLE = (TensorSpec("w", "F32", (64, 8), 0), TensorSpec("b", "U8", (100,), None))
TOPOLOGY = place_layout(Layout(dp_replicate=2), 1, ("n", "n"))
PLAN = SaveContext(1, TOPOLOGY, TABLE, "c", "d", 512)


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


def save(store: FolderStore, step: int) -> int:
    for rank in range(2):
        tensors = place_boxes(owned_boxes(TOPOLOGY, TABLE, rank), TABLE)
        head = blob_header(tensors)
        body = b"".join(content(step, p.box, p.nbytes) for p in tensors)
        write_part(store, PLAN, step, rank, [head + body], len(head), tensors, {"position": step})
    commit = try_commit(store, PLAN, step)
    assert commit is not None
    return commit.step


def child(folder: str, point: int, said: int) -> None:
    """Save steps 2 and 3, and say so, unless the point comes first."""
    store = Killing(folder, point)
    for number in (2, 3):
        os.write(said, b"%d\n" % save(store, number))
        retention.apply_retention(store, retention.RetentionRules(1), (), ())


def drive(root: str) -> None:
    """One child and one run folder per point, until a child comes through alive."""
    for point in itertools.count():
        folder = f"{root}/{point}"
        os.mkdir(folder)
        save(FolderStore(folder), 1)
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                child(folder, point, write)
                os._exit(0)
            finally:
                os._exit(1)
        os.close(write)
        _, status = os.waitpid(pid, 0)
        with os.fdopen(read) as pipe:
            said = [int(line) for line in pipe]
        print(json.dumps([point, os.waitstatus_to_exitcode(status), said]), flush=True)
        if status == 0:
            return


if __name__ == "__main__":
    drive(sys.argv[1])
