"""A run whose disk fills up and has room again: `python -m tests.support.train_on_full_disk
FOLDER [kill]`.

With `kill`, one of three workers is lost while the disk is full. FOLDER is a real, size-limited
tmpfs. Everything is judged by what `train --json` prints: the journal cannot be written meanwhile.
Prints what was seen as one JSON line.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil

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


def main(root: Path, kill: bool) -> None:
    run_file = write_run_file(root)
    process = start(
        "train",
        run_file,
        "train.steps=1000000",
        "train.evaluate.every=0",
        "checkpoint.every_steps=20",
        "checkpoint.keep_last=2",
        *(("layout.workers=3", "train.batch_size=6") if kill else ()),
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
        wait_until(lambda: last(kind) >= step or process.poll() is not None, 60, f"{kind} {step}")
        assert process.poll() is None, said

    wait("checkpoint_committed", 40)
    fill(root / "filler")
    full_at = last("step_done")
    wait("step_done", full_at + 200)
    done = 0
    if kill:
        started = [r["event"]["pid"] for r in records if r["kind"] == "worker_started"]
        victim, *survivors = started[:3]
        os.kill(victim, signal.SIGKILL)
        wait("worker_lost", 1)
        done = last("step_done")
        time.sleep(3)  # on the full disk, the survivors hold what they have
        assert all(psutil.pid_exists(pid) for pid in survivors), said
    (root / "filler").unlink()
    if kill:
        wait("generation_started", done)
    wait("checkpoint_committed", last("step_done") + 1)
    process.send_signal(signal.SIGTERM)
    code = process.wait(60)
    for thread in threads:
        thread.join(10)
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
                "done": done,
                "begun": last("generation_started"),
            }
        )
    )


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main(Path(sys.argv[1]), sys.argv[2:] == ["kill"])
