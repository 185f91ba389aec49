"""Time to enter the next generation with replicas kept, relative to a bare gloo group.

It is the work of a survivor after it has noticed another replica's loss, until it can compute. That
is the group of all ranks, an agreement on the step, and the groups of the reduction cells. The
floor is one bare gloo group among the same processes, measured just before. Both take the slowest
rank's time. The ratio is the median over rounds with its 95 % bootstrap interval.

    python -m benchmarks.runtime.recover                dp2, dp4, and replicas of two ranks
    python -m benchmarks.runtime.recover dp4            some layouts
    python -m benchmarks.runtime.recover --quick        a tiny model: does it run?
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.peers.rebuild import layout_of
from benchmarks.peers.work import Work
from benchmarks.runtime.paired import estimate
from benchmarks.runtime.turns import Loop, LoopError

LAYOUTS = ("dp2", "dp4", "dp2_dpshard2", "dp2_tp2", "dp2_pp2")
TIMES = ("recover", "control", "agree", "groups", "join")


def measure(name: str, work: Work, settings: argparse.Namespace) -> dict[str, Any]:
    """Rounds of one layout; the first is left out. Raises LoopError."""
    world = layout_of(name, work).world_size
    with tempfile.TemporaryDirectory() as folder:
        loop = Loop(
            f"recover:{name}", work, sys.executable, Path(folder) / "loop", settings.seconds, world
        )
        try:
            loop.answers()
            loop.block(1)
            ranks = [answer["notes"] for answer in loop.block(settings.rounds)]
        finally:
            loop.close()
    slowest = [
        {key: max(note[key] for note in notes) for key in notes[0]}
        for notes in zip(*ranks, strict=True)
    ]
    ratios = [one["recover"] / one["join"] for one in slowest]
    medians = {key: statistics.median(one[key] for one in slowest) for key in slowest[0]}
    return {"ratio": estimate(ratios), **medians}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("layouts", nargs="*", default=LAYOUTS, help="such as dp4, dp2_tp2")
    parser.add_argument("--quick", action="store_true", help="tiny model, 3 rounds")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=120.0, help="deadline of one layout")
    settings = parser.parse_args()
    work = Work(batch=16, microbatches=4, sequence=64)
    if settings.quick:
        settings.rounds = 3
        work = Work("tiny", 512, 32, batch=16, microbatches=4)
    print(f"{'layout':<14}" + "".join(f"{key:>9}" for key in TIMES) + "   CPU ms   x floor")
    failed = False
    for name in settings.layouts:
        try:
            found = measure(name, work, settings)
        except LoopError as error:
            print(f"{name:<14} does not run here: {error}", flush=True)
            failed = True
            continue
        times = "".join(f"{found[key] * 1e3:9.1f}" for key in TIMES)
        print(
            f"{name:<14}{times}   {found['recover_cpu'] * 1e3:6.1f}   {found['ratio']}", flush=True
        )
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
