"""Cost of a save, way by way: `python -m benchmarks.runtime.checkpoint [--quick] [--peers-python
PATH]`.

A state that every rank holds completely is saved again and again. The output has the pause, its CPU
seconds on the training thread, and the seconds until the save is durable. The pause is the time in
which training may not continue: the call, and the wait before the next update. Half a second of
matrix products is between the two, in place of a step. The save may become durable in the middle of
these products. Floors are measured in the same processes. They are a copy of a rank's share into
existing memory, one xxh3 of it, and one direct write of all of the state. Copy and write are
measured again before each save. A multiple of a floor is the median of pairs.

Then, on the most ranks, real steps of 61 M parameters (2,048 tokens) with a save before them
alternate with steps without a save. The output has the difference of their times.

Medians; the first save of each way is not counted. Plain torch.save is synced to disk here;
torch_checkpointing never syncs, and needs an interpreter that has it.
"""

from __future__ import annotations

import argparse
import json
import math
import secrets
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.runtime.children import Ranks
from benchmarks.runtime.saving.ranks import Mover, ranks_of

WAYS = (
    "torch.save",
    "DCP save",
    "DCP async",
    "DCP async, stager kept",
    "DCP async, process",
    "torch_checkpointing",
    "ours, waiting",
    "ours, hidden",
    "ours, memory",
)
FEW = ("torch.save", "DCP save", "DCP async", "ours, waiting", "ours, hidden")
STEPPING = ("DCP async", "DCP async, stager kept", "ours, waiting", "ours, hidden", "ours, memory")
COLUMNS = 1024
FLOORS = ("memcpy", "memcpy_cpu", "write", "write_cpu")
LARGE = 10**8
"""Bytes of a state whose write is not mostly syncs."""
LEAST, COPIES = 2, 9
"""Saves of a way, and of the one whose copy is compared with a memcpy."""


@dataclass(frozen=True)
class Case:
    """tensors x rows x 1,024 fp32."""

    name: str
    tensors: int
    rows: int
    ways: tuple[str, ...] = WAYS

    @property
    def bytes(self) -> int:
        return 4 * COLUMNS * self.tensors * self.rows


CASES = (Case("700 MB", 60, 2849), Case("1.3 GB", 60, 5290), Case("3,000 tensors", 3000, 1, FEW))
QUICK = (Case("4 MB", 4, 256, ("DCP async", "ours, waiting", "ours, hidden", "ours, memory")),)


@dataclass(frozen=True)
class Row:
    """Medians over saves of the slower rank; `x_`: over the floor before the save. CPU seconds are
    the least of all saves, over the least of all floors. Neighbours of a virtual machine take
    memory bandwidth, so the cost of the same copy varies up to fivefold. The question is the cost
    of our copy without such neighbours."""

    pause: float
    cpu: float
    durable: float
    x_memcpy: float
    x_memcpy_cpu: float
    x_write: float


def slowest(answers: Sequence[dict[str, Any]], key: str) -> list[float]:
    """Of the slowest rank, save by save."""
    return list(map(max, zip(*(answer[key] for answer in answers), strict=True)))


def median(answers: Sequence[dict[str, Any]], key: str) -> float:
    return statistics.median(slowest(answers, key))


def ratio(answers: Sequence[dict[str, Any]], key: str, floor: str) -> float:
    pairs = zip(slowest(answers, key), slowest(answers, floor), strict=True)
    return statistics.median(value / least for value, least in pairs)


def row_of(answers: Sequence[dict[str, Any]]) -> Row:
    cpu, memcpy_cpu = (min(slowest(answers, key)) for key in ("cpu", "memcpy_cpu"))
    return Row(
        median(answers, "wall"),
        cpu,
        median(answers, "durable"),
        ratio(answers, "wall", "memcpy"),
        cpu / memcpy_cpu,
        ratio(answers, "durable", "write"),
    )


def saves(
    ranks: Ranks, ways: Sequence[str], settings: argparse.Namespace, floor: dict[str, list[float]]
) -> dict[str, Row | str]:
    """A row for each way; the floors that were taken on the way are added to `floor`."""
    rows: dict[str, Row | str] = {}
    for way in ways:
        least = COPIES if way == "ours, waiting" and not settings.quick else LEAST
        answers = ranks.ask(
            {
                "way": way,
                "rounds": max(least, settings.rounds),
                "least": least,
                "seconds": settings.seconds,
                "beside": 0.02 if settings.quick else 0.5,
            }
        )
        failed = [answer["error"] for answer in answers if "error" in answer]
        rows[way] = failed[0] if failed else row_of(answers)
        for key in () if failed else FLOORS:
            floor[key] += slowest(answers, key)
    return rows


def case(of: Case, world: int, settings: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One state on one number of ranks: floors, and a row for each way."""
    folder.mkdir()
    mover = Mover(folder / "run")
    task = mover.task(world, folder, tensors=of.tensors, rows=of.rows, columns=COLUMNS)
    rounds = 3 if settings.quick else 7
    floor: dict[str, list[float]] = {key: [] for key in FLOORS}
    try:
        with ranks_of(task, sys.executable) as ranks:
            hashes = ranks.ask({"floor": "xxh3", "rounds": rounds})
            here = [way for way in of.ways if way != "torch_checkpointing"]
            rows = saves(ranks, here, settings, floor)
        if "torch_checkpointing" in of.ways and settings.peers_python:
            theirs = replace(task, meeting=f"{task.meeting}.theirs")
            with ranks_of(theirs, settings.peers_python) as ranks:
                rows |= saves(ranks, ["torch_checkpointing"], settings, floor)
    finally:
        mover.close()
        shutil.rmtree(folder, ignore_errors=True)
    medians = {key: statistics.median(values or [math.nan]) for key, values in floor.items()}
    return medians | {
        "xxh3": median(hashes, "wall"),
        "xxh3_cpu": median(hashes, "cpu"),
        "rows": rows,
    }


def show(of: Case, world: int, found: dict[str, Any]) -> None:
    print(
        f"\n{of.name}, {of.tensors:,} tensors, {world} rank(s). Floors: memcpy of a share "
        f"{_ms(found['memcpy'])} ms (CPU {_ms(found['memcpy_cpu'])}), xxh3 of it "
        f"{_ms(found['xxh3'])} (CPU {_ms(found['xxh3_cpu'])}), direct write of all "
        f"{_ms(found['write'])} (CPU {_ms(found['write_cpu'])})"
    )
    print(f"{'':24}{'pause ms':>10}{'x memcpy':>10}{'CPU ms':>9}{'durable s':>11}{'x write':>9}")
    for way in (way for way in WAYS if way in found["rows"]):
        row = found["rows"][way]
        if isinstance(row, str):
            print(f"{way:24}  failed: {row}")
            continue
        in_memory = way == "ours, memory"
        durable = "" if in_memory else f"{row.durable:11.2f}{row.x_write:9.2f}"
        print(f"{way:24}{row.pause * 1e3:10.1f}{row.x_memcpy:10.2f}{row.cpu * 1e3:9.1f}{durable}")
    for line in verdicts(of, world, found) if of in CASES else []:
        print(f"  {line}")


def verdicts(of: Case, world: int, found: dict[str, Any]) -> list[str]:
    """The bars that this table can decide."""
    rows = {way: row for way, row in found["rows"].items() if isinstance(row, Row)}
    out = []
    if (waiting := rows.get("ours, waiting")) is not None:
        memcpy = waiting.cpu / waiting.x_memcpy_cpu  # taken in turn with it
        bound = 1.25 * memcpy + 15e-6 * of.tensors
        out.append(_bar("waiting, CPU", waiting.cpu, bound, "1.25 memcpy + 15 us a tensor"))
        if of.bytes > LARGE:
            write = waiting.durable / waiting.x_write
            out.append(_bar("durable", waiting.durable, 1.5 * write, "1.5 direct writes"))
    if (hidden := rows.get("ours, hidden")) is not None:
        if of.bytes > LARGE:
            write = hidden.durable / hidden.x_write
            out.append(_bar("hidden, durable", hidden.durable, 1.5 * write, "1.5 direct writes"))
        out.append(_bar("hidden", hidden.pause, 0.010, "10 ms"))
        for way, share in (("DCP async", 0.10), ("DCP save", 0.02)):
            if way in rows:
                bound = share * rows[way].pause
                out.append(_bar("hidden", hidden.pause, bound, f"{100 * share:g} % of {way}"))
    return out


def _bar(what: str, value: float, bound: float, meaning: str) -> str:
    held = "yes" if value <= bound else "NO"
    return f"{what}: {_ms(value)} of at most {_ms(bound)} ms ({meaning}): {held}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def steps(world: int, settings: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Real steps with a save before each, over steps without: medians of pairs."""
    folder.mkdir()
    mover = Mover(folder / "run")
    task = mover.task(world, folder, train=True, quick=settings.quick)
    found: dict[str, Any] = {}
    try:
        with ranks_of(task, sys.executable) as ranks:
            for way in STEPPING[-2:] if settings.quick else STEPPING:
                answers = ranks.ask({"way": way, "pairs": settings.pairs})
                failed = [answer["error"] for answer in answers if "error" in answer]
                if failed:
                    found[way] = failed[0]
                    continue
                slow, plain = (
                    [max(b) for b in zip(*(a[k] for a in answers), strict=True)]
                    for k in ("with", "without")
                )
                ratios = [a / b for a, b in zip(slow, plain, strict=True)]
                found[way] = {
                    "step": statistics.median(plain),
                    "ratio": statistics.median(ratios),
                    "ratios": ratios,
                    "blocked": median(answers, "blocked"),
                }
    finally:
        mover.close()
        shutil.rmtree(folder, ignore_errors=True)
    return found


def show_steps(world: int, found: dict[str, Any]) -> None:
    print(f"\nreal steps on {world} rank(s) with a save before them, over steps without")
    print(f"{'':24}{'step s':>8}{'x longer':>10}{'lowest':>8}{'highest':>8}{'blocked ms':>12}")
    for way, row in found.items():
        if isinstance(row, str):
            print(f"{way:24}  failed: {row}")
            continue
        print(
            f"{way:24}{row['step']:8.3f}{row['ratio']:10.3f}{min(row['ratios']):8.3f}"
            f"{max(row['ratios']):8.3f}{row['blocked'] * 1e3:12.1f}"
        )


def _settings() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("cases", nargs="*", help=", ".join([*(c.name for c in CASES), "steps"]))
    parser.add_argument("--quick", action="store_true", help="little state, few rounds")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5, help="saves of each way, at most")
    parser.add_argument("--seconds", type=float, default=4.0, help="for them; at least two saves")
    parser.add_argument("--pairs", type=int, default=3, help="of steps, of each way")
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary one)")
    parser.add_argument("--peers-python", default="", help="an interpreter that has the others")
    parser.add_argument("--json", type=Path, help="also write everything here")
    settings = parser.parse_args()
    if settings.quick:
        settings.rounds, settings.pairs = 2, 1
    return settings


def main() -> None:
    settings = _settings()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    everything: dict[str, Any] = {}
    wanted = set(settings.cases)
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=settings.folder) as name:
        for world in settings.ranks:
            for of in QUICK if settings.quick else CASES:
                if wanted and of.name not in wanted:
                    continue
                found = case(of, world, settings, Path(name, secrets.token_hex(4)))
                show(of, world, found)
                rows = {w: r if isinstance(r, str) else asdict(r) for w, r in found["rows"].items()}
                everything[f"{of.name}, {world}"] = found | {"rows": rows}
            if world == max(settings.ranks) and (not wanted or "steps" in wanted):
                found = steps(world, settings, Path(name, secrets.token_hex(4)))
                show_steps(world, found)
                everything[f"steps, {world}"] = found
    if settings.json:
        settings.json.write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
