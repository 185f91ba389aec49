"""Floors of a recovery: `python -m benchmarks.runtime.recovering.floors` prints JSON.

error      from SIGKILL of one of four processes of a bare gloo group to the first error in another
           one. All wait in a reduction. (By itself the last may learn of it by the group's time
           limit alone.)
regroup    a gloo group of three, over a file store, to its first reduction
import     a process that imports torch and ends
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

WORLD = 4


def group(rank: int, world: int, path: str) -> Any:
    import torch.distributed as dist

    store = dist.FileStore(path, world)
    return dist.ProcessGroupGloo(store, rank, world, timedelta(seconds=60))


def process(rank: int, folder: str, pipe: Connection) -> None:
    import torch

    old = group(rank, WORLD, f"{folder}/old")
    value = torch.ones(1000)
    old.allreduce([value]).wait()
    begun = time.time()
    if rank < WORLD - 1:
        new = group(rank, WORLD - 1, f"{folder}/new")
        new.allreduce([value]).wait()
    pipe.send(time.time() - begun)
    try:
        while True:
            old.allreduce([value]).wait()
            if rank == 0:
                time.sleep(0.002)
    except RuntimeError:
        pipe.send(time.time())
    os._exit(0)  # the destructor of the broken group may wait


def once(folder: str) -> tuple[float, float]:
    context = multiprocessing.get_context("fork")
    pipes, children = [], []
    for rank in range(WORLD):
        ours, theirs = context.Pipe()
        child = context.Process(target=process, args=(rank, folder, theirs))
        child.start()
        pipes.append(ours)
        children.append(child)
    regroup = max([pipe.recv() for pipe in pipes][:-1])
    time.sleep(0.2)  # of reductions
    begun = time.time()
    os.kill(children[-1].pid or 0, signal.SIGKILL)
    first = wait(pipes[:-1])
    noticed = min(pipe.recv() for pipe in pipes[:-1] if pipe in first)
    for child in children:
        child.kill()
        child.join()
    return noticed - begun, regroup


def imported() -> float:
    begun = time.time()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.time() - begun


def main() -> None:
    import torch

    torch.set_num_threads(1)
    found = []
    for _ in range(5):
        with tempfile.TemporaryDirectory() as folder:
            found.append(once(str(Path(folder))))
    error, regroup = (statistics.median(each) for each in zip(*found, strict=True))
    print(json.dumps({"error": error, "regroup": regroup, "import": imported()}))


if __name__ == "__main__":
    main()
