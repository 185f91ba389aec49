"""`holdfast train` with workers that something befalls: `python -m tests.support.faulty_trainer
RUN_FILE [key=value ...]`.

The faults are in the environment, as JSON: {"raise": [[generation, rank, step], ...], "die
agreeing": [[generation, rank], ...], "last": [[first step, last step, milliseconds], ...]}. "last"
gives the duration of steps of the first generation. "on a device": the workers communicate by
`fake_nccl`, with these changes of its row in the device table. "system": a folder in place of
`/sys`, for the links of the node. "kernel hangs": [generation, rank, step]: from there on the
device does nothing more. "float8 anywhere": the command takes `train.precision: fp8` on a CPU,
where torchao emulates it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from holdfast.cli.main import main as command
from holdfast.elastic.protocol.worker_spec import WorkerSpec
from holdfast.launch import local
from holdfast.launch.start import machine
from holdfast.wire.process_end import skip_collections
from holdfast.wire.secret import Secret

DEEDS = "HOLDFAST_TEST_DEEDS"


def run(boot: WorkerSpec, secret: Secret) -> int:
    """A worker's entry."""
    from holdfast.elastic.worker import main as worker
    from holdfast.machine import links
    from holdfast.training.engine.engine import StepEngine
    from holdfast.training.recover import recover as recovering
    from tests.support import fake_nccl

    deeds = json.loads(os.environ[DEEDS])
    if deeds.get("on a device"):
        fake_nccl.install(**deeds["on a device"])
        links.SYSTEM = Path(deeds.get("system", links.SYSTEM))
    compute, agree = StepEngine.compute, recovering.agree  # type: ignore[attr-defined]

    def computing(self: StepEngine, batches: Any) -> None:
        groups = self.groups
        if [groups.topology.generation, groups.rank, self.step] in deeds.get("raise", []):
            raise ValueError("the test broke it")
        if [groups.topology.generation, groups.rank, self.step] == deeds.get("kernel hangs"):
            fake_nccl.hang_kernels()
        if groups.topology.generation == 1:
            for first, last, milliseconds in deeds.get("last", []):
                if first <= self.step <= last:
                    time.sleep(milliseconds / 1e3)
        compute(self, batches)

    def agreeing(control: Any, *given: Any, **named: Any) -> Any:
        at = [worker_of.generation, worker_of.rank]
        if at in deeds.get("die agreeing", []):
            os.kill(os.getpid(), signal.SIGKILL)
        return agree(control, *given, **named)

    class _At:
        """The process's place: the newest generation that it takes part in."""

        generation, rank = boot.generation, boot.rank

    worker_of = _At()
    speak = worker.Worker._connect_reporter

    def speaking(self: Any, topology: Any, rank: int, *rest: Any) -> None:
        worker_of.generation, worker_of.rank = topology.generation, rank
        speak(self, topology, rank, *rest)

    StepEngine.compute = computing  # type: ignore[method-assign]
    recovering.agree = agreeing  # type: ignore[attr-defined]
    worker.Worker._connect_reporter = speaking  # type: ignore[method-assign]
    return worker.run(boot, secret)


def main() -> int:
    """The command itself, with another entry for its workers."""
    skip_collections()
    if json.loads(os.environ[DEEDS]).get("float8 anywhere"):
        machine.refuse_float8 = lambda loaded, hardware: None
    local.train_locally.__kwdefaults__["entry"] = "tests.support.faulty_trainer:run"
    return command(["train", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
