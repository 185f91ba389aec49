"""Cost of one rebuild in live processes, as a multiple of the work that every rebuild needs.

A rebuild is what `training/recover/recover.py` does if a replica cannot stay as it is. It ends the
groups of one generation, joins and agrees in the next, and builds model, optimizer and reducer.
Then it moves the state, ranks shifted by one, in the same processes. (A replica of one rank always
stays.) The floor is measured just before, in the same processes. It
is one memcpy of a rank's state into existing memory, plus one bare gloo group among the same ranks.
Both take the slowest rank's time; the ratio is the median over rounds with its 95 % bootstrap
interval. The first rebuild of a process (imports, caches) is left out. `tp2>dpshard2` takes turns
between two layouts. "build" is the end of the old engine too, and Python's collection of it,
without which its memory would stay.

`--kept`: the work of a survivor after it has noticed another replica's loss, until it can compute.
That is the group of all ranks, an agreement on the step, and the groups of the reduction cells. Its
floor is the bare gloo group alone.

    python -m benchmarks.runtime.rebuild                  2 and 4 ranks
    python -m benchmarks.runtime.rebuild tp2 pp2          some layouts
    python -m benchmarks.runtime.rebuild --quick          a tiny model: does it run?
    python -m benchmarks.runtime.rebuild --kept           dp2, dp4, and replicas of two ranks
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.peers.rebuild import PHASES, layout_of
from benchmarks.peers.work import Work
from benchmarks.runtime.children import RankError
from benchmarks.runtime.paired import estimate
from benchmarks.runtime.turns import Loop

LAYOUTS = (
    "dpshard2",
    "tp2",
    "pp2",
    "tp2>dpshard2",
    "dpshard4",
    "tp4",
    "pp4",
    "dp2_dpshard2",
    "dp2_tp2",
    "dp2_pp2",
    "pp2_tp2",
    "pp2_dpshard2",
    "dpshard2_tp2",
    "dp2_tp2>pp2_dpshard2",
)
KEPT = ("dp2", "dp4", "dp2_dpshard2", "dp2_tp2", "dp2_pp2")
FLOORS = {"rebuild": ("memcpy", "join"), "recover": ("join",)}
TIMES = {
    "rebuild": ("rebuild", *PHASES, *FLOORS["rebuild"]),
    "recover": ("recover", "control", "agree", "groups", *FLOORS["recover"]),
}
"""By the loop of `benchmarks.peers` that does it."""


def measure(kind: str, name: str, work: Work, rounds: int, seconds: float) -> dict[str, Any]:
    """Rounds of one layout; the first is left out. kind: of TIMES. Raises RankError."""
    world = layout_of(name.split(">")[0], work).world_size
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "loop"
        with Loop(f"{kind}:{name}", work, sys.executable, place, seconds, world) as loop:
            loop.answers()
            loop.block(name.count(">") + 1)  # each layout once
            ranks = [answer["notes"] for answer in loop.block(rounds)]
    slowest = [
        {key: max(note[key] for note in notes) for key in notes[0]}
        for notes in zip(*ranks, strict=True)
    ]
    ratios = [one[kind] / sum(one[floor] for floor in FLOORS[kind]) for one in slowest]
    medians = {key: statistics.median(one[key] for one in slowest) for key in slowest[0]}
    return {"ranks": world, "ratio": estimate(ratios), **medians}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("layouts", nargs="*", help="such as dp2_tp2, tp2>dpshard2")
    parser.add_argument("--quick", action="store_true", help="tiny model, 3 rounds")
    parser.add_argument("--kept", action="store_true", help="replicas stay complete")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=120.0, help="deadline of one layout")
    parser.add_argument("--json", type=Path, help="also write everything here")
    settings = parser.parse_args()
    work = Work(batch=16, microbatches=4, sequence=64)
    if settings.quick:
        settings.rounds = 3
        work = Work("tiny", 512, 32, batch=16, microbatches=4)
    kind, layouts = ("recover", KEPT) if settings.kept else ("rebuild", LAYOUTS)
    heads = "".join(f"{key:>9}" for key in TIMES[kind])
    print(f"{'layout':<21} MB/rank   {heads}   CPU ms   x floor")
    everything: dict[str, Any] = {}
    for name in settings.layouts or layouts:
        try:
            found = measure(kind, name, work, settings.rounds, settings.seconds)
        except RankError as error:
            print(f"{name:<21} does not run here: {error}", flush=True)
            everything[name] = {"error": str(error)}
            continue
        everything[name] = found
        times = "".join(f"{found[key] * 1e3:9.1f}" for key in TIMES[kind])
        print(
            f"{name:<21} {found['bytes'] / 1e6:7.1f}   {times}   "
            f"{found[f'{kind}_cpu'] * 1e3:6.1f}   {found['ratio']}",
            flush=True,
        )
    if settings.json:
        settings.json.write_text(json.dumps(everything, default=asdict, indent=2) + "\n")
    sys.exit(int(any("error" in found for found in everything.values())))


if __name__ == "__main__":
    main()
