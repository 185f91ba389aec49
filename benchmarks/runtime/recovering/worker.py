"""A worker of `benchmarks.runtime.recovery`: the real one, whose microbatches take a given time.

The time passes asleep, as it does for a process that waits for its accelerator. So four workers on
two cores step like four machines. Every applied step is reported by one line in a file: `seconds
since the epoch, step, generation, rank, process, workers`. If this process had computed
microbatches of a step that does not continue from any kept part, it reports that step. The line has
the step's number below zero, and is written when the next one begins. SIGUSR1: raise an exception
in the current microbatch, once, and report its time by a line of step 0.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from typing import Any

from benchmarks.runtime.children import train_with
from holdfast.elastic.protocol.worker_spec import WorkerSpec
from holdfast.wire.secret import Secret

MICROBATCH, LINES = "RECOVERY_MICROBATCH_SECONDS", "RECOVERY_LINES"


def run(boot: WorkerSpec, secret: Secret) -> int:
    """A worker's entry."""
    from holdfast.elastic.worker import main as worker
    from holdfast.training.engine.engine import StepEngine
    from holdfast.training.engine.objective import NextTokenObjective

    seconds = float(os.environ[MICROBATCH])
    lines = os.open(os.environ[LINES], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    asked = threading.Event()
    waker, woken = os.pipe()

    def ask(*_: object) -> None:
        asked.set()
        os.write(woken, b"x")

    signal.signal(signal.SIGUSR1, ask)
    forward, begin, update = NextTokenObjective.forward, StepEngine.begin, StepEngine.update
    engines: list[StepEngine] = []
    open_step, computed = 0, 0  # the step that is not applied, how many microbatches it has

    def tell(engine: StepEngine, step: int) -> None:
        topology = engine.groups.topology
        said = (
            time.time(),
            step,
            topology.generation,
            engine.groups.rank,
            os.getpid(),
            topology.world_size,
        )
        os.write(lines, (" ".join(map(str, said)) + "\n").encode())

    def beginning(self: StepEngine, step: int) -> Any:
        nonlocal open_step, computed
        engines[:] = [self]
        # by replica; of all of them alike, nothing or something
        kept = self.plan.computed_by_replica(step)
        if computed and not (step == open_step and kept):
            tell(self, -open_step)
        open_step = step
        computed = len(kept[self.groups.coordinate.replica]) if kept else 0
        return begin(self, step)

    def waiting(self: NextTokenObjective, *given: Any, **named: Any) -> Any:
        nonlocal computed
        select.select([waker], [], [], seconds)
        if asked.is_set():
            asked.clear()
            os.read(waker, 64)
            tell(engines[0], 0)
            raise ValueError("the benchmark broke it")
        loss = forward(self, *given, **named)
        computed += bool(engines)
        return loss

    def telling(self: StepEngine, verdict: Any) -> float:
        nonlocal computed
        rate = update(self, verdict)
        computed = 0
        tell(self, self.step)
        return rate

    NextTokenObjective.forward = waiting  # type: ignore[method-assign]
    StepEngine.begin = beginning  # type: ignore[method-assign]
    StepEngine.update = telling  # type: ignore[method-assign]
    return worker.run(boot, secret)


if __name__ == "__main__":
    sys.exit(train_with("benchmarks.runtime.recovering.worker:run"))
