"""A run whose last save finds no room: `python -m tests.support.train_to_a_full_end FOLDER OTHER`.

FOLDER is a real tmpfs with room for three checkpoints; the run makes four. While it trains, a file
takes the rest. Once the run says that the last state waits, the file is removed. The same run in
OTHER, which nothing disturbs, is compared. Prints what was seen as one JSON line.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from pathlib import Path

from tests.support.commands import apart, start, write_run_file
from tests.support.ranks import wait_until

MODEL = (
    "model.dim=256",
    "model.layers=1",
    "model.heads=4",
    "model.kv_heads=4",
    "model.ffn_dim=304",
    "layout.workers=1",
    "train.steps=80",
    "train.evaluate.every=0",
    "checkpoint.every_steps=20",
)  # 7.4 MiB


def main(root: Path, other: Path) -> None:
    run_file = write_run_file(other)
    apart("train", run_file, *MODEL, deadline=200).succeeds()
    plain = apart("train", run_file, *MODEL, f"folder={root / 'plain'}", deadline=200)
    commits = len(list((root / "plain" / "commits").iterdir()))
    same = [apart("checkpoint", "diff", root / "plain", other / "run").code]
    shutil.rmtree(root / "plain")
    process = start("train", run_file, *MODEL, f"folder={root / 'full'}")
    said: list[str] = []
    assert process.stdout
    out = process.stdout
    thread = threading.Thread(target=lambda: said.extend(out))
    thread.start()
    wait_until(lambda: any("step 20 committed" in line for line in said), what="a checkpoint")
    filler = root / "filler"
    status = os.statvfs(root)
    with filler.open("wb") as file:
        file.write(bytes(max(0, status.f_bavail * status.f_bsize - 500_000)))
    wait_until(lambda: any("waits in memory" in line for line in said), what="the last save waits")
    is_alive = process.poll() is None
    filler.unlink()
    code = process.wait(200)
    thread.join(200)
    same.append(apart("checkpoint", "diff", root / "full", other / "run").code)
    found = {"codes": [plain.code, code], "commits": commits, "same": same, "alive": is_alive}
    print(json.dumps(found | {"said": "".join(said)}))


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main(Path(sys.argv[1]), Path(sys.argv[2]))
