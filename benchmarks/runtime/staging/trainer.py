"""The process that trains and saves: `python -m benchmarks.runtime.staging.trainer ORDER`, one JSON
line.

It runs real steps of our decoder under plain PyTorch. A save begins at a step boundary when it is
due and the last save has ended. Every step's wall and CPU seconds (of this process, all threads)
are kept. So steps during a save can be compared with steps without one.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil
import torch
import torch.distributed as dist

from benchmarks.runtime.saving import floors
from benchmarks.runtime.saving.steps import Trainer
from benchmarks.runtime.saving.task import Task
from benchmarks.runtime.staging.ways import Places, SafeWay, make

DEADLINE = 300.0


@dataclass(frozen=True)
class Order:
    way: str
    model: dict[str, Any]
    places: Places
    saves: int
    every: float  # seconds between the begins of two saves, at least
    plain: int  # steps at least, between the end of a save and the next begin
    helpers: dict[str, int] = field(default_factory=dict)  # processes that work for the save

    @staticmethod
    def from_json(text: str) -> Order:
        value = json.loads(text)
        return Order(**(value | {"places": Places(**value["places"])}))


@dataclass(frozen=True)
class Step:
    begun: float
    ended: float
    cpu: float


@dataclass(frozen=True)
class Save:
    begun: float
    pause: float  # seconds that training paused
    outside: float  # seconds from the begin until it is safe outside of this machine
    stored: float | None  # and in the network storage
    steps: int  # begun before it had ended
    lost: float  # seconds that it and these steps took beyond as many plain ones
    cpu: float  # CPU seconds of this process, likewise


class Loop:
    """Trains; keeps what every step took."""

    def __init__(self, trainer: Trainer, way: SafeWay) -> None:
        self._trainer, self._way = trainer, way
        self._number = 0
        self.steps: list[Step] = []
        self.begins: list[tuple[int, float, float, float]] = []  # step, begun, pause, CPU of begin

    def plain(self) -> None:
        self._step(None)

    def save(self) -> None:
        self._number += 1
        cpu, begun = time.process_time(), time.monotonic()
        self._way.begin(self._number)
        pause = time.monotonic() - begun
        cpu = time.process_time() - cpu
        pause += self._step(self._way)
        self.begins.append((self._number, begun, pause, cpu))

    def ended(self) -> float | None:
        """Return when the newest save ended; None while it has not. Raises RuntimeError if it
        failed."""
        ends = self._way.ends(self._number)
        if ends.error is not None:
            raise RuntimeError(ends.error)
        if time.monotonic() - self.begins[-1][1] > DEADLINE:
            raise RuntimeError(f"a save has not ended in {DEADLINE:g} s")
        last = ends.stored if self._way.stores else ends.outside
        return last if ends.outside is not None else None

    def _step(self, way: SafeWay | None) -> float:
        cpu, begun = time.process_time(), time.monotonic()
        blocked = self._trainer.train(way)
        self.steps.append(Step(begun, time.monotonic(), time.process_time() - cpu))
        return blocked


def until_due(loop: Loop, every: float, plain: int) -> None:
    """Train until the newest save has ended, `plain` steps have been done since, and the next one
    is due."""
    rest = plain
    while True:
        ended = loop.ended()
        if ended is not None and rest <= 0 and time.monotonic() - loop.begins[-1][1] >= every:
            return
        loop.plain()
        if ended is not None:
            rest -= 1


def saves_of(loop: Loop, way: SafeWay, plain: Step) -> list[Save]:
    """Return all saves but the first, which sets things up. plain: cost of a step without a
    save."""
    out = []
    for number, begun, pause, cpu in loop.begins[1:]:
        ends = way.ends(number)
        assert ends.outside is not None
        until = ends.stored if ends.stored is not None else ends.outside
        beside = [step for step in loop.steps if begun <= step.begun < until]
        last = beside[-1].ended if beside else begun + pause
        out.append(
            Save(
                begun,
                pause,
                ends.outside - begun,
                None if ends.stored is None else ends.stored - begun,
                len(beside),
                last - begun - len(beside) * plain.ended,
                cpu + sum(step.cpu for step in beside) - len(beside) * plain.cpu,
            )
        )
    return out


def plain_step(loop: Loop, way: SafeWay) -> Step:
    """Return the medians of steps without a save; the first step of all is not counted."""
    spans = []
    for number, begun, _, _ in loop.begins:
        ends = way.ends(number)
        assert ends.outside is not None
        spans.append((begun, ends.stored if ends.stored is not None else ends.outside))
    alone = [
        step
        for step in loop.steps[1:]
        if all(step.ended <= begun or step.begun >= ended for begun, ended in spans)
    ]
    return Step(
        0.0,
        statistics.median(step.ended - step.begun for step in alone),
        statistics.median(step.cpu for step in alone),
    )


def cpu_of(pid: int) -> float:
    """CPU seconds of a process so far."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def run(order: Order) -> dict[str, Any]:
    trainer = Trainer(0, Task(1, "", "", "", "", train=True, model=order.model))
    nbytes = sum(tensor.nbytes for tensor in trainer.state.values())
    copies = floors.memcpy(nbytes, 3)
    way = make(order.way, order.places, trainer.state)
    try:
        loop = Loop(trainer, way)
        for _ in range(order.plain):
            loop.plain()
        before: dict[int, float] = {}
        for number in range(order.saves + 1):
            if number == 1:
                helpers = _helpers(order)
                before = {pid: cpu_of(pid) for pid in helpers.values()}
            loop.save()
            until_due(loop, order.every, order.plain)
        used = {name: (cpu_of(pid) - before[pid]) / order.saves for name, pid in helpers.items()}
        plain = plain_step(loop, way)
        return {
            "bytes": nbytes,
            "memcpy": statistics.median(wall for wall, _ in copies),
            "step": plain.ended,
            "step_cpu": plain.cpu,
            "steps": len(loop.steps),
            "saves": [asdict(save) for save in saves_of(loop, way, plain)],
            "helpers": used,
        }
    finally:
        way.close()


def _helpers(order: Order) -> dict[str, int]:
    """Names and processes; a process that the way has started is called "writer"."""
    own = psutil.Process().children(recursive=True)
    writers = {f"writer {n}" if n else "writer": child.pid for n, child in enumerate(own)}
    return order.helpers | writers


def main() -> None:
    order = Order.from_json(sys.argv[1])
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="hf-") as meeting:
        dist.init_process_group("gloo", init_method=f"file://{meeting}/m", rank=0, world_size=1)
        try:
            found = run(order)
        except Exception as error:
            said = str(error).strip().splitlines() or [""]
            found = {"error": f"{type(error).__name__}: {said[-1]}"[:300]}
    print(json.dumps(found), file=replies, flush=True)
    os._exit(0)  # what the ways left running ends here


if __name__ == "__main__":
    main()
