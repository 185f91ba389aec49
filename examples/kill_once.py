"""Train a run twice, kill a worker of the second one on the way, and compare both ends.

    python examples/kill_once.py train examples/own_model/run.yaml
    python examples/kill_once.py run examples/own_loop/train.py --workers 2

The arguments are those of the command `holdfast`. The run folders are runs/kill-once-undisturbed
and runs/kill-once-killed; what lies there is deleted first. The recipes use these functions, too.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import holdfast

RUNS = Path("runs")


def command(*words: str | Path) -> None:
    """Run `holdfast WORDS`. If it fails, this script ends with its exit code."""
    if code := _start(*words).wait():
        sys.exit(code)


def train_with_a_kill(*words: str | Path, folder: Path, at_step: int) -> None:
    """Run `holdfast WORDS`, which trains in `folder`. Once a step is done, kill one worker."""
    process, ended, killed = _start(*words), threading.Event(), threading.Event()

    def kill() -> None:
        workers = {}
        for record in holdfast.follow(folder, ended, seconds=0.05, wait=300):
            if record["kind"] == "worker_started":
                workers[record["rank"]] = record["pid"]
            if record["kind"] == "step_done" and record["step"] >= at_step:
                last = max(workers)
                os.kill(workers[last], signal.SIGKILL)  # as kill -9 does
                killed.set()
                print(f"step {record['step']}: killed worker {last}", flush=True)
                return

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        code = process.wait()
    finally:
        ended.set()
        killer.join()
    if not code and not killed.is_set():
        code = f"{folder}: the run ended before step {at_step}, so no worker was killed"
    if code:
        sys.exit(code)


def compare(undisturbed: Path, killed: Path) -> None:
    """Compare weights and optimizer, byte by byte, and the losses of all steps."""
    command("checkpoint", "diff", undisturbed, killed)
    one, other = (losses(folder) for folder in (undisturbed, killed))
    if one != other:
        sys.exit("the losses differ")
    first, last = one[1], one[max(one)]
    print(f"the losses of all {len(one)} steps are the same, too: {first:.4f} ... {last:.4f}")


def losses(folder: Path) -> dict[int, float]:
    """Of each step."""
    records = holdfast.journal(folder)
    return {r["step"]: r["loss"] for r in records if r["kind"] == "step_done"}


def near(path: Path) -> Path:
    """The same path, from the current folder: what the commands below print is shorter."""
    return Path(os.path.relpath(path))


def empty(*folders: Path) -> None:
    """Delete what an earlier start of a recipe left."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _start(*words: str | Path) -> subprocess.Popen[bytes]:
    print(f"\n$ holdfast {shlex.join(map(str, words))}", flush=True)
    return subprocess.Popen([sys.executable, "-m", "holdfast.cli.main", *map(str, words)])


def main(words: list[str]) -> None:
    if not words or words[0] not in ("train", "run"):
        sys.exit(__doc__)
    folders = RUNS / "kill-once-undisturbed", RUNS / "kill-once-killed"
    empty(*folders)

    def into(folder: Path) -> list[str]:
        if words[0] == "train":
            return [*words, f"folder={folder}"]
        return ["run", "--folder", str(folder), *words[1:]]

    command(*into(folders[0]))
    train_with_a_kill(*into(folders[1]), folder=folders[1], at_step=20)
    compare(*folders)


if __name__ == "__main__":
    main(sys.argv[1:])
