"""A worker of `benchmarks.runtime.steady`: the real one, which captures in some stretches of steps
only.

Steps come in stretches. The kind of a stretch follows from the step's number alone (`kind_of`), so
all ranks agree. In those that are not "on" nothing is captured, so nothing is hashed or sent. In
those that are "floor" the training thread copies as many bytes itself, at the end of each step.
That shows what a plain memcpy takes under this load. Each step is reported by one line: `seconds
since the epoch, step, rank`, then the seconds that the training thread spent in each of `PARTS`.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import numpy as np

from benchmarks.runtime.children import train_with
from holdfast.elastic.protocol.worker_spec import WorkerSpec
from holdfast.wire.secret import Secret

STRETCH, LINES, COPIED = "STEADY_STRETCH", "STEADY_LINES", "STEADY_COPIED"
PARTS = ("ready", "capture", "fence", "announce", "memcpy")
"""Methods of the saver, and the bare copy in stretches that are floor."""
KINDS = ("off", "on", "floor", "floor", "on", "off")


def kind_of(step: int, stretch: int) -> str:
    """Return the kind of a step's stretch; the first of all is on, to fault all memory in."""
    number = (step - 1) // stretch
    return KINDS[(number - 1) % len(KINDS)] if number else "on"


def run(boot: WorkerSpec, secret: Secret) -> int:
    """A worker's entry."""
    from holdfast.elastic.worker import main as worker
    from holdfast.elastic.worker.checkpointer import SnapshotSaver
    from holdfast.training.engine.runner import TrainingLoop, _SaveScheduler

    stretch = int(os.environ[STRETCH])
    lines = os.open(os.environ[LINES], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    spent = dict.fromkeys(PARTS, 0.0)
    source = np.ones(int(os.environ[COPIED]), np.uint8)
    target = np.ones_like(source)
    by_steps, report = _SaveScheduler._tiers_due_by_steps, TrainingLoop._report

    def timed(name: str) -> None:
        plain = getattr(SnapshotSaver, name)

        def wrapped(*given: Any, **named: Any) -> Any:
            begun = time.perf_counter()
            try:
                return plain(*given, **named)
            finally:
                spent[name] += time.perf_counter() - begun

        setattr(SnapshotSaver, name, wrapped)

    def some(self: _SaveScheduler, step: int) -> frozenset[int]:
        return by_steps(self, step) if kind_of(step, stretch) == "on" else frozenset()

    def telling(self: TrainingLoop, batch: Any, *given: Any) -> None:
        report(self, batch, *given)
        if kind_of(batch.step, stretch) == "floor":
            begun = time.perf_counter()
            np.copyto(target, source)
            spent["memcpy"] = time.perf_counter() - begun
        said = (time.time(), batch.step, self.rank, *spent.values())
        spent.update(dict.fromkeys(PARTS, 0.0))
        os.write(lines, (" ".join(map(str, said)) + "\n").encode())

    for name in PARTS[:-1]:
        timed(name)
    _SaveScheduler._tiers_due_by_steps = some  # type: ignore[method-assign]
    TrainingLoop._report = telling  # type: ignore[method-assign, assignment]
    return worker.run(boot, secret)


if __name__ == "__main__":
    sys.exit(train_with("benchmarks.runtime.steadying.worker:run"))
