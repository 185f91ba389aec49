"""One rank: `python -m benchmarks.runtime.saving.worker RANK TASK`. Orders are JSON lines on
standard input, one answer each on standard output.

    {"floor": "xxh3", "rounds": n}
    {"way": name, "rounds": n, "least": n, "seconds": s, "beside": s}
                                                            saves of a state that does not change,
                                                            each after its floors
    {"way": name, "pairs": n}                               real steps, with and without it
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.runtime.saving import floors
from benchmarks.runtime.saving.task import Task, Way

KEYS = ("wall", "cpu", "durable", "memcpy", "memcpy_cpu", "write", "write_cpu")
SETTLING = 0.3


class Rank:
    def __init__(self, rank: int, task: Task) -> None:
        self.rank, self.task = rank, task
        self.step = 0
        self._trainer: Any = None
        if task.train:
            from benchmarks.runtime.saving.steps import Trainer

            self._trainer = Trainer(rank, task)
            self.state: Mapping[str, Tensor] = self._trainer.state
        else:
            generator = torch.Generator().manual_seed(1)
            self.state = {
                f"t{i}": torch.randn(task.rows, task.columns, generator=generator)
                for i in range(task.tensors)
            }

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        if "floor" in order:
            size = sum(t.nbytes for t in self.state.values()) // self.task.world
            found = getattr(floors, order["floor"])(size, order["rounds"])
            return {"wall": [wall for wall, _ in found], "cpu": [cpu for _, cpu in found]}
        way = self._make(order["way"])
        try:
            if "pairs" in order:
                return dict(self._trainer.pairs(way, order["pairs"], self._next))
            rounds = order["least"], order["rounds"]
            return self._saves(way, rounds, order["seconds"], order["beside"])
        finally:
            way.close()

    def _next(self) -> int:
        self.step += 1
        return self.step

    def _make(self, name: str) -> Way:
        if name.startswith("ours"):
            from benchmarks.runtime.saving import ours

            return ours.Ours(name, self.task, self.rank, self.state)
        if name == "torch_checkpointing":
            from benchmarks.runtime.saving.elsewhere import Managed

            return Managed(self.task, self.state)
        from benchmarks.runtime.saving import ways

        return ways.make(name, self.task, self.state)

    def _saves(
        self, way: Way, rounds: tuple[int, int], seconds: float, beside: float
    ) -> dict[str, Any]:
        """Make the given least and most number of saves. The first is not counted: it sets things
        up. A thread waits for the end of each, so a save that ends during the computing is not
        mistaken for one that ends after it.

        Neighbours of a virtual machine take memory and disk bandwidth as they come and go. So the
        floors are taken before each save, by itself, and not once for all.
        """
        out: dict[str, list[float]] = {key: [] for key in KEYS}
        compute, floor = _matmuls(), self._floors()
        watcher = ThreadPoolExecutor(1)

        def ended() -> float:
            way.finish()
            return time.perf_counter()

        deadline = time.monotonic() + seconds
        for number in range(rounds[1] + 1):
            floors_of_it = floor() if number else {}
            dist.barrier()
            step, begun = self._next(), time.perf_counter()
            first = floors.timed(lambda step=step: way.begin(step))  # type: ignore[misc]
            end = watcher.submit(ended)
            compute(beside)
            second = floors.timed(way.fence)
            durable = end.result() - begun
            if number:
                found = {
                    "wall": first[0] + second[0],
                    "cpu": first[1] + second[1],
                    "durable": durable,
                } | floors_of_it
                for key, value in found.items():
                    out[key].append(value)
            late = torch.tensor([float(number >= rounds[0] and time.monotonic() > deadline)])
            dist.all_reduce(late, dist.ReduceOp.MAX)
            if late.item():
                break
        watcher.shutdown()
        return out

    def _floors(self) -> Callable[[], dict[str, float]]:
        """Return the function that measures the floors of a save. They are a copy of each rank's
        share, at the same time, and then one write of all by the first rank alone."""
        whole = sum(t.nbytes for t in self.state.values())
        copy = floors.Memcpy(whole // self.task.world)
        disk = floors.DirectWrite(Path(self.task.folder), whole) if self.rank == 0 else None

        def settle() -> None:
            """What was removed, and is only now given back to the disk, is not the next one's."""
            if disk is not None:
                time.sleep(SETTLING)
                os.sync()
                time.sleep(SETTLING)
            dist.barrier()

        def take() -> dict[str, float]:
            settle()
            copied = copy.time()
            dist.barrier()
            written = disk.time() if disk is not None else (0.0, 0.0)
            settle()
            return {
                "memcpy": copied[0],
                "memcpy_cpu": copied[1],
                "write": written[0],
                "write_cpu": written[1],
            }

        return take


def _matmuls() -> Callable[[float], None]:
    a, b = torch.randn(384, 384), torch.randn(384, 384)
    out = torch.empty_like(a)

    def compute(seconds: float) -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            torch.mm(a, b, out=out)

    return compute


def main() -> None:
    rank, task = int(sys.argv[1]), Task(**json.loads(sys.argv[2]))
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(task.world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{task.meeting}", rank=rank, world_size=task.world
    )
    me = Rank(rank, task)

    def reply(value: dict[str, Any]) -> None:
        replies.write(json.dumps(value) + "\n")
        replies.flush()

    reply({"ready": True})
    for line in sys.stdin:
        try:
            reply(me.answer(json.loads(line)))
        except Exception as error:
            said = str(error).strip().splitlines() or [""]
            reply({"error": f"{type(error).__name__}: {said[-1]}"[:300]})
    os._exit(0)  # what the ways left running ends here


if __name__ == "__main__":
    main()
