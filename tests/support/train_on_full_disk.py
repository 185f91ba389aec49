"""A run whose disk fills up and has room again:
`python -m tests.support.train_on_full_disk FOLDER`.

FOLDER is a real, size-limited tmpfs. Everything is judged by what `train --json` prints, because
the journal cannot be written meanwhile.
Prints what was seen as one JSON line.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from tests.support.commands import apart, start, write_run_file
from tests.support.ranks import wait_until


def fill(path: Path) -> None:
    """Until not a byte more fits."""
    with path.open("ab", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            return


def main(root: Path) -> None:
    run_file = write_run_file(root)
    process = start(
        "train",
        run_file,
        "train.steps=1000000",
        "train.evaluate.every=0",
        "checkpoint.every_steps=20",
        "checkpoint.keep_last=2",
        "--json",
    )
    records: list[dict[str, Any]] = []
    said: list[str] = []
    assert process.stdout
    assert process.stderr
    out, err = process.stdout, process.stderr
    threads = [
        threading.Thread(target=lambda: records.extend(map(json.loads, out))),
        threading.Thread(target=lambda: said.extend(err)),
    ]
    for thread in threads:
        thread.start()

    def last(kind: str) -> int:
        return max((r["event"]["step"] for r in records if r["kind"] == kind), default=0)

    def wait(kind: str, step: int) -> None:
        wait_until(lambda: last(kind) >= step or process.poll() is not None, what=f"{kind} {step}")
        assert process.poll() is None, said

    wait("checkpoint_committed", 40)
    fill(root / "filler")
    full_at = last("step_done")
    wait("step_done", full_at + 200)
    (root / "filler").unlink()
    wait("checkpoint_committed", last("step_done") + 1)
    process.send_signal(signal.SIGTERM)
    code = process.wait(120)
    for thread in threads:
        thread.join(120)
    audit, verify = (
        apart("data", "audit", root / "run"),
        apart("checkpoint", "verify", root / "run"),
    )
    skipped = [r["event"]["reason"] for r in records if r["kind"] == "checkpoint_skipped"]
    print(
        json.dumps(
            {
                "code": code,
                "said": "".join(said),
                "skipped": skipped,
                "audit": [audit.code, audit.out],
                "verify": verify.code,
                "left": [str(p) for p in (root / "run").rglob(".tmp*")],
                "lost": sum(r["kind"] == "worker_lost" for r in records),
            }
        )
    )


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main(Path(sys.argv[1]))
