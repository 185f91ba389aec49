"""A worker of `benchmarks.steady`: the real one, which captures in some stretches of steps only.

Steps come in stretches; what a stretch is for follows from the step's number alone (`kind_of`), so
all ranks agree. In those that are not "on" nothing is captured, so nothing is hashed or sent. Each
step is told by one line: `seconds since the epoch, step, rank, seconds that the training thread
spent in the saver`.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from holdfast.elastic.boot import WorkerBoot
from holdfast.wire.secret import Secret

STRETCH, LINES = "STEADY_STRETCH", "STEADY_LINES"
KINDS = ("off", "on", "floor", "floor", "on", "off")


def kind_of(step: int, stretch: int) -> str:
    """What the stretch of a step is for; the first of all is on, to fault all memory in."""
    number = (step - 1) // stretch
    return KINDS[(number - 1) % len(KINDS)] if number else "on"


def run(boot: WorkerBoot, secret: Secret) -> int:
    """A worker's entry."""
    from holdfast.elastic.worker import main as worker
    from holdfast.elastic.worker.saver import ArenaSaver
    from holdfast.train.runner import _Loop

    stretch = int(os.environ[STRETCH])
    lines = os.open(os.environ[LINES], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    spent = [0.0]
    by_steps, report = _Loop._by_steps, _Loop._report

    def timed(name: str) -> None:
        plain = getattr(ArenaSaver, name)

        def wrapped(*given: Any, **named: Any) -> Any:
            begun = time.perf_counter()
            try:
                return plain(*given, **named)
            finally:
                spent[0] += time.perf_counter() - begun

        setattr(ArenaSaver, name, wrapped)

    def some(self: _Loop, step: int) -> frozenset[str]:
        return by_steps(self, step) if kind_of(step, stretch) == "on" else frozenset()

    def telling(self: _Loop, batch: Any, *given: Any) -> None:
        report(self, batch, *given)
        said = f"{time.time()} {batch.step} {self.rank} {spent[0]}\n"
        spent[0] = 0.0
        os.write(lines, said.encode())

    for name in ("ready", "capture", "fence", "announce"):
        timed(name)
    _Loop._by_steps = some  # type: ignore[method-assign]
    _Loop._report = telling  # type: ignore[method-assign]
    return worker.run(boot, secret)


def main() -> int:
    """`holdfast train` with this entry for its workers."""
    from holdfast.cli.main import main as command
    from holdfast.launch import local

    local.run.__kwdefaults__["entry"] = "benchmarks.steadying.worker:run"
    return command(["train", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
