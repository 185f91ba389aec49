"""`holdfast train` with workers whose data is wrong: `python -m tests.support.faulty_data_trainer
RUN.yaml ...`.

Agent, fork server, worker, loader, engine and journal are the real ones; only the source that a
worker reads its microbatches from is exchanged.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial

import numpy as np

from holdfast.cli.main import main
from holdfast.data.stream.batch import MASKED_TARGET, Batches, Microbatch
from holdfast.elastic.protocol.worker_spec import WorkerSpec
from holdfast.launch import local
from holdfast.wire.secret import Secret

Place = tuple[int, int]  # (step, microbatch)

INSTEAD: dict[Place, Place] = {
    (2, 0): (2, 3),
    (2, 3): (2, 0),  # exchanged
    (4, 2): (4, 1),  # one twice, and its neighbour never
}
EMPTY: Place = (5, 1)  # dropped: fed without one token that carries loss


class Faulty(Batches):
    def microbatch(self, step: int, index: int, part: int = 0, parts: int = 1) -> Microbatch:
        asked = super().microbatch(step, index, part, parts)
        if (step, index) == EMPTY:
            return replace(asked, targets=np.full_like(asked.targets, MASKED_TARGET), tokens=0)
        fed = super().microbatch(*INSTEAD.get((step, index), (step, index)), part, parts)
        return replace(fed, entries=asked.entries)


def run(boot: WorkerSpec, secret: Secret) -> int:
    """A worker's entry."""
    from holdfast.elastic.worker import main as worker
    from holdfast.training.engine import task

    task.Batches = Faulty  # type: ignore[attr-defined]
    return worker.run(boot, secret)


if __name__ == "__main__":
    local.train_locally = partial(
        local.train_locally, entry="tests.support.faulty_data_trainer:run"
    )
    sys.exit(main(["train", *sys.argv[1:]]))
