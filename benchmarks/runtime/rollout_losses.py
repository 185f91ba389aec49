"""Which share of the time is effective if a tenth of the steps lose an actor or a trainer.

    python -m benchmarks.runtime.rollout_losses [--steps 60] [--share 0.1] [--lag 1] [--tokens 48]

The same run twice: undisturbed, and with SIGKILL for an actor or a trainer, drawn at random, in a
share of the steps. Effective is the undisturbed time of the steps, divided by the disturbed one
(the definition of RobustRL). Both are taken from the journal, from the end of step 5 to the end of
the last one. The kills also compare losses: the curves must be equal to the bit.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from tests.support.rollout_run import RolloutRun, write_run_file

from holdfast.events import StepDone
from holdfast.wire.journal import read_journal
from holdfast.wire.store.run_store import FolderStore

WARM_STEPS = 5


def done_at(folder: Path) -> dict[int, float]:
    """When each step was done the first time, by the agent's clock."""
    found: dict[int, float] = {}
    with suppress(FileNotFoundError):
        for record in read_journal(FolderStore(folder)):
            if isinstance(record.event, StepDone):
                found.setdefault(record.event.step, record.time)
    return found


def disturb(run: RolloutRun, steps: Collection[int], chooser: random.Random) -> Counter[str]:
    """Kill an actor or a trainer in each of these steps; return the kills by role."""
    run.start()
    assert run.process is not None
    killed, left = Counter[str](), sorted(steps)
    while run.process.poll() is None:
        time.sleep(0.05)
        if left and max(done_at(run.folder), default=0) >= left[0] - 1:
            left.pop(0)
            role = chooser.choice(("actor", "worker"))
            if pids := run.pids(role):
                with suppress(ProcessLookupError):
                    os.kill(chooser.choice(pids), signal.SIGKILL)
                    killed[role] += 1
    assert run.process.returncode == 0, run.said
    return killed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--share", type=float, default=0.1)
    parser.add_argument("--lag", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--actors", type=int, default=4)
    given = parser.parse_args()
    chooser = random.Random(1)
    settings = (
        f"train.steps={given.steps}",
        f"rollout.lag={given.lag}",
        f"rollout.max_tokens={given.tokens}",
        f"rollout.actors={given.actors}",
        f"layout.workers={given.workers}",
        f"data.sequence_length={given.tokens + 16}",
        f"model.max_position={given.tokens + 24}",
        "checkpoint.every_steps=10",
    )
    with tempfile.TemporaryDirectory() as folder:
        run_file = write_run_file(Path(folder))
        seconds = []
        alone = RolloutRun(run_file, Path(folder) / "alone", settings)
        alone.finish()
        killed = RolloutRun(run_file, Path(folder) / "killed", settings)
        count = round(given.share * given.steps)
        chosen = chooser.sample(range(WARM_STEPS + 2, given.steps), count)
        kills = disturb(killed, chosen, chooser)
        for run in (alone, killed):
            at = done_at(run.folder)
            seconds.append(at[given.steps] - at[WARM_STEPS])
        same = alone.curve() == killed.curve()
    each = seconds[0] / (given.steps - WARM_STEPS)
    print(f"{given.steps} steps, lag {given.lag}: {each:.2f} s each")
    print(f"kills: {dict(kills)} in {count} steps")
    print(f"effective: {seconds[0] / seconds[1]:.1%} ({seconds[0]:.1f} s of {seconds[1]:.1f} s)")
    print(f"losses and metrics equal: {same}")


if __name__ == "__main__":
    main()
