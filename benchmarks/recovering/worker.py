"""A worker of `benchmarks.recovery`: the real one, whose microbatches take a given time.

The time passes asleep, as it does for a process that waits for its accelerator: so four workers on
two cores step like four machines. Every step that is applied is told by one line in a file:
`seconds since the epoch, step, generation, rank, process, workers`. SIGUSR1: raise an exception in
the next microbatch, once.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from holdfast.elastic.boot import WorkerBoot
from holdfast.wire.secret import Secret

MICROBATCH, LINES = "RECOVERY_MICROBATCH_SECONDS", "RECOVERY_LINES"


def run(boot: WorkerBoot, secret: Secret) -> int:
    """A worker's entry."""
    from holdfast.elastic.worker import main as worker
    from holdfast.train.engine import StepEngine
    from holdfast.train.objective import NextToken

    seconds = float(os.environ[MICROBATCH])
    lines = os.open(os.environ[LINES], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    broken: list[bool] = []
    signal.signal(signal.SIGUSR1, lambda *_: broken.append(True))
    forward, update = NextToken.forward, StepEngine.update

    def waiting(self: NextToken, *given: Any, **named: Any) -> Any:
        if broken:
            broken.clear()
            raise ValueError("the benchmark broke it")
        time.sleep(seconds)
        return forward(self, *given, **named)

    def telling(self: StepEngine, verdict: Any) -> float:
        rate = update(self, verdict)
        topology = self.groups.topology
        said = (time.time(), self.step, topology.generation, self.groups.rank, os.getpid(),
                topology.world_size)  # fmt: skip
        os.write(lines, (" ".join(map(str, said)) + "\n").encode())
        return rate

    NextToken.forward = waiting  # type: ignore[method-assign]
    StepEngine.update = telling  # type: ignore[method-assign]
    return worker.run(boot, secret)


def main() -> int:
    """`holdfast train` with this entry for its workers."""
    from holdfast.cli.main import main as command
    from holdfast.launch import local

    local.run.__kwdefaults__["entry"] = "benchmarks.recovering.worker:run"
    return command(["train", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
