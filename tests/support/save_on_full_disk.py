"""A run whose disk fills up during a save: `python -m tests.support.save_on_full_disk FOLDER`.

FOLDER is a real, size-limited tmpfs. Prints what happened as one JSON line.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.checkpoint.restore.verify import find_newest_verified, verify
from holdfast.core.format.manifest import commit_key
from holdfast.core.sharding.state_table import TensorSpec
from holdfast.events import CheckpointFailed
from tests.support.mover_process import Mover, Workers, assert_holds, files, topology

TABLE = (TensorSpec("w", "F32", (4096, 32), 0),)  # 512 KiB


def leave_free(folder: Path, room: int) -> Path:
    """Fill the disk until about `room` bytes are left."""
    filler = folder / "filler"
    with filler.open("wb") as file:
        usage = os.statvfs(folder)
        file.write(b"x" * max(0, usage.f_bavail * usage.f_frsize - room))
    return filler


def main(folder: Path) -> None:
    (folder / "run").mkdir()
    mover = Mover(folder / "run", keep_last=5)
    topo = topology(2)
    client = mover.begin(topo, TABLE)
    workers = Workers(client, topo, TABLE)
    workers.commit(1)
    report: dict[str, object] = {}
    for step, room in ((2, 100_000), (3, 300_000 + 40_960)):
        # Room for no blob at all, then for the blob of one rank: probe P2.
        filler = leave_free(folder, room)
        workers.save(step)
        report[f"reason{step}"] = workers.capturers[0].wait_until_committed(step, 60)
        assert client.drain(60)  # no save is being written any more
        report[f"left{step}"] = [
            n for n in files(mover.store) if f"{step:010d}-rank" in n or ".tmp" in n
        ]
        found = find_newest_verified(mover.store)
        assert found is not None
        assert_holds(found, 1, TABLE)
        filler.unlink()
    workers.commit(4)
    assert_holds(Checkpoint.open(mover.store, commit_key(1, 4)), 4, TABLE)
    assert verify(mover.store, commit_key(1, 4)) == []
    events, _ = client.events(0)
    report["failed"] = [e.step for e in events if isinstance(e, CheckpointFailed)]
    mover.close()
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
