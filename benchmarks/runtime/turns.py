"""Two loops that do the same training step, timed in turns.

Each loop is two worker processes (`benchmarks/peers`) with one thread each, over the same weights
and tokens. First the losses of three steps must agree, or the pair says so and is not timed. Then
the loops take turns, a block of steps each, in an order that alternates. All processes live
throughout, and those that wait do not spin. The ratio is the peer's time over ours (above 1: ours
is faster), taken within a round. Rounds continue until the 95 % bootstrap interval of the median is
within +-0.015, or `--rounds` or `--row-seconds` is reached. Wall time is the slower rank's; CPU
time is summed over ranks and threads.

A pair may name a floor, a third loop that takes its turn in every round. It does only the matrix
products and the memory traffic that no implementation of the step can leave out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Any

from benchmarks.peers.work import Work
from benchmarks.runtime.children import RankError, Ranks
from benchmarks.runtime.paired import Estimate, estimate

WORLD = 2
PARITY_STEPS = 3
PARITY = 2e-5  # relative, in float32
TARGET_HALF_WIDTH = 0.015


@dataclass(frozen=True)
class Pair:
    """One row: ratio = time of `peer` / time of `ours`, and what is asked of it."""

    name: str
    peer: str
    ours: str
    bar: str
    least: float
    on_low_end: bool = False  # whether the interval's low end, not the median, must pass
    microbatches: int = 1
    peer_compile: bool = False
    our_compile: bool = False
    floor: str = ""
    experts: int = 0
    skewed: bool = False

    def verdict(self, wall: Estimate) -> str:
        """An interval that lies on one side of the bar decides; one that never became narrow
        enough and holds the bar decides nothing."""
        if wall.half_width > TARGET_HALF_WIDTH and wall.low <= self.least <= wall.high:
            return "unsure"
        reached = wall.low > self.least if self.on_low_end else wall.median >= self.least
        return "yes" if reached else "NO"


class Loop(Ranks):
    """The worker processes of one loop."""

    def __init__(
        self, name: str, work: Work, python: str, folder: Path, seconds: float, world: int = WORLD
    ):
        folder.mkdir()
        about = (str(world), str(folder / "meeting"), json.dumps(asdict(work)))
        commands = [("benchmarks.peers.worker", name, str(rank), *about) for rank in range(world)]
        super().__init__(name, commands, folder, seconds, python)

    def block(self, steps: int) -> list[dict[str, Any]]:
        """Do `steps` steps; wall, cpu and losses of each rank. Raises RankError."""
        return self.ask({"steps": steps})


def losses(answers: Sequence[dict[str, Any]]) -> list[float]:
    """Of each step, the mean over the ranks that know a loss (they have equally many tokens)."""
    steps = zip(*(answer["losses"] for answer in answers), strict=True)
    return [statistics.fmean(loss for loss in step if loss is not None) for step in steps]


def largest_difference(a: Sequence[float], b: Sequence[float]) -> float:
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def costs(answers: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """(wall of the slower rank, CPU of all) of a block."""
    return max(a["wall"] for a in answers), sum(a["cpu"] for a in answers)


def measure(pair: Pair, settings: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Parity, then paired rounds. Raises RankError."""
    shape: dict[str, Any] = (
        {"preset": "tiny", "vocabulary": 512, "sequence": 32} if settings.quick else {}
    )
    loops: dict[str, Loop] = {}

    def start(which: str, name: str, compiles: bool = False) -> None:
        work = Work(
            **shape,
            microbatches=pair.microbatches,
            compile=compiles,
            experts=pair.experts,
            skewed=pair.skewed,
        )
        own = name.startswith("holdfast") or which == "floor"
        python = sys.executable if own else settings.peers_python
        loops[which] = Loop(name, work, python, folder / which, settings.seconds)

    try:
        start("peer", pair.peer, pair.peer_compile)
        start("ours", pair.ours, pair.our_compile)
        if pair.floor:
            start("floor", pair.floor)
        for loop in loops.values():
            loop.answers()
        first = {name: losses(loops[name].block(PARITY_STEPS)) for name in ("peer", "ours")}
        result: dict[str, Any] = {
            "difference": largest_difference(first["peer"], first["ours"]),
            "losses": first,
        }
        if result["difference"] > (10 * PARITY if pair.our_compile else PARITY):
            return result
        return result | rounds(loops, settings)
    finally:
        for loop in loops.values():
            loop.close()


def rounds(loops: dict[str, Loop], settings: argparse.Namespace) -> dict[str, Any]:
    """Blocks in turns until the interval is narrow enough."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in loops}
    wall = cpu = Estimate(0, 0, 0)
    begin = time.monotonic()
    for index in range(settings.rounds):
        for name in sorted(loops, reverse=bool(index % 2)):
            taken[name].append(costs(loops[name].block(settings.steps)))
        wall, cpu = (ratio(taken, "peer", "ours", clock) for clock in (0, 1))
        is_late = time.monotonic() - begin > settings.row_seconds
        if index + 1 >= settings.least and (is_late or wall.half_width <= TARGET_HALF_WIDTH):
            break
    medians = {
        f"{name}_{clock}_ms": statistics.median(t[c] for t in times) / settings.steps * 1e3
        for name, times in taken.items()
        for c, clock in enumerate(("wall", "cpu"))
    }
    floors = {
        f"{name}_over_floor": ratio(taken, name, "floor", 0)
        for name in ("peer", "ours")
        if "floor" in taken
    }
    return {"rounds": len(taken["ours"]), "wall": wall, "cpu": cpu, **medians, **floors}


def ratio(
    taken: dict[str, list[tuple[float, float]]], above: str, below: str, clock: int
) -> Estimate:
    """Of two loops' times, round by round. clock: 0 wall, 1 CPU."""
    pairs = zip(taken[above], taken[below], strict=True)
    return estimate([a[clock] / b[clock] for a, b in pairs])


def heading(width: int, floor: bool) -> str:
    return (
        f"{'pair':<{width}} {'peer ms':>9} {'ours ms':>9}   {'wall ratio':<22} "
        f"{'CPU ratio':<22} {'n':>4}   loss    {'x floor peer, ours   ' * floor}asked"
    )


def row(pair: Pair, result: dict[str, Any], judge: bool, width: int = 11) -> str:
    """One line of the table; a verdict only where the work is the real one."""
    if "wall" not in result:
        return f"{pair.name:<{width}} losses differ by {result['difference']:.1e}: not timed"
    verdict = f"  {pair.verdict(result['wall'])}" if judge and pair.least else ""
    floors = [result[f"{name}_over_floor"] for name in ("peer", "ours") if pair.floor]
    above = "".join(f"{floor.median:6.2f}    " for floor in floors) + " " * bool(floors)
    return (
        f"{pair.name:<{width}} {result['peer_wall_ms']:9.1f} {result['ours_wall_ms']:9.1f}   "
        f"{result['wall']!s:<22} {result['cpu']!s:<22} {result['rounds']:4d}   "
        f"{result['difference']:.0e}   {above}{pair.bar}{verdict}"
    )


def _settings(pairs: Sequence[Pair], title: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("pairs", nargs="*", help=", ".join(pair.name for pair in pairs))
    parser.add_argument("--quick", action="store_true", help="tiny model, 3 rounds")
    parser.add_argument("--rounds", type=int, default=60, help="at most")
    parser.add_argument("--least", type=int, default=8, help="rounds at least")
    parser.add_argument("--row-seconds", type=float, default=inf, help="no round begins after that")
    parser.add_argument("--only", nargs="+", default=[], help="the same as naming pairs")
    parser.add_argument("--steps", type=int, default=2, help="of one block")
    parser.add_argument("--seconds", type=float, default=300.0, help="deadline of one block")
    parser.add_argument("--peers-python", default=sys.executable, help="interpreter of the peers")
    parser.add_argument("--json", type=Path, help="also write everything here")
    settings = parser.parse_args()
    settings.pairs += settings.only
    if settings.quick:
        settings.rounds, settings.least = min(settings.rounds, 3), 3
    unknown = set(settings.pairs) - {pair.name for pair in pairs}
    if unknown:
        parser.error(f"unknown pairs {sorted(unknown)}")
    return settings


def compare(pairs: Sequence[Pair], title: str) -> int:
    """Run the command: print one table of the pairs that the command line names (none: all).

    Returns the exit code: 1 if losses differ.
    """
    settings = _settings(pairs, title)
    width = max(len(pair.name) for pair in pairs)
    print(heading(width, any(pair.floor for pair in pairs)))
    everything: dict[str, Any] = {}
    failed = False
    for pair in pairs:
        if settings.pairs and pair.name not in settings.pairs:
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                result = measure(pair, settings, Path(folder))
                print(row(pair, result, not settings.quick, width), flush=True)
                failed |= "wall" not in result
            except RankError as error:
                result = {"error": str(error)}
                print(f"{pair.name:<{width}} does not run here: {error}", flush=True)
        everything[pair.name] = result
    if settings.json:
        settings.json.write_text(json.dumps(everything, default=asdict, indent=2) + "\n")
    return int(failed)
