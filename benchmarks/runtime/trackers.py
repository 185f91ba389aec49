"""Seconds of a step without a tracker, with one, and with one whose server hangs.

    python -m benchmarks.runtime.trackers [--steps 300] [--rounds 3]

Each run trains the tiny model of the tests in one worker. The three kinds take turns, so that a
busy moment of the machine meets all of them alike.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median, quantiles

from tests.support.commands import apart, write_run_file
from tests.support.tracker_server import TRACKER, TrackerServer

from holdfast.events import StepDone
from holdfast.wire.journal import read_journal
from holdfast.wire.store.run_store import FolderStore

WARM_UP_STEPS = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as root, TrackerServer() as server:
        server.mode = "hang"
        run_file = write_run_file(Path(root) / "run", documents=60)
        hanging = (
            f"logging.trackers=[{TRACKER!r}]",
            f"logging.options=[{TRACKER}.url={server.url}]",
            "logging.timeout_seconds=5",
            "logging.finish_seconds=0",
        )
        kinds: dict[str, tuple[str, ...]] = {
            "none": (),
            "csv": ("logging.trackers=csv",),
            "server that hangs": hanging,
        }
        seconds: dict[str, list[list[float]]] = {name: [] for name in kinds}  # by round
        for number in range(arguments.rounds):
            for name, settings in kinds.items():
                folder = Path(root) / f"{number}-{name.replace(' ', '-')}"
                done = apart(
                    "train",
                    run_file,
                    f"folder={folder}",
                    f"train.steps={arguments.steps}",
                    "layout.workers=1",
                    "train.evaluate.every=0",
                    "checkpoint.every_steps=1000",
                    *settings,
                    deadline=600,
                )
                assert done.code == 0, done.err
                seconds[name].append(_step_seconds(folder))
        assert server.requests["hang"] >= arguments.rounds
    print(f"{'tracker':<20}{'steps':>8}{'p50 ms':>10}{'p95 ms':>10}   p50 of each round, ms")
    for name, rounds in seconds.items():
        found = [value for one in rounds for value in one]
        p95 = quantiles(found, n=20)[-1]
        each = " ".join(f"{median(one) * 1e3:.2f}" for one in rounds)
        print(f"{name:<20}{len(found):>8}{median(found) * 1e3:>10.2f}{p95 * 1e3:>10.2f}   {each}")


def _step_seconds(folder: Path) -> list[float]:
    records = read_journal(FolderStore(folder))
    steps = [r.event for r in records if isinstance(r.event, StepDone)]
    return [event.seconds for event in steps if event.step > WARM_UP_STEPS]


if __name__ == "__main__":
    main()
