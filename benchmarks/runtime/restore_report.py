"""What the measurements of `benchmarks.runtime.restore` say: a table, and whether the bars hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MEMORY_WALL, MEMORY_CPU, DISK_WALL, SLOW_WALL, READ, BACK = 1.3, 1.6, 1.2, 1.2, 1.05, 1.0
CHECKED = ", checked"


class Cost(NamedTuple):
    wall: float
    cpu: float


class Row(NamedTuple):
    name: str
    cost: Cost
    floor: str
    read: float | None


class Killed(NamedTuple):
    """Seconds from a kill until the next process runs, has memory, and has its bytes."""

    start: float
    memory: float
    back: float


def show(rows: Sequence[Row], megabytes: int) -> None:
    floors = {row.name: row.cost for row in rows if not row.floor}
    print(f"{megabytes} MiB of state; seconds, and multiples of the floor")
    print(f"{'':34}{'wall':>9}{'CPU':>9}{'x wall':>9}{'x CPU':>9}{'read':>8}  floor")
    for row in rows:
        line = f"{row.name:34}{row.cost.wall:9.3f}{row.cost.cpu:9.3f}"
        if row.floor:
            floor = floors[row.floor]
            line += f"{row.cost.wall / floor.wall:9.2f}"
            line += f"{row.cost.cpu / max(floor.cpu, 1e-9):9.2f}"
            line += f"{row.read:8.3f}" if row.read is not None else f"{'':8}"
            line += f"  {row.floor}"
        print(line)


def verdicts(rows: Sequence[Row], killed: Killed) -> list[str]:
    """The bars, and whether they hold."""
    floors = {row.name: row.cost for row in rows if not row.floor}
    out = []
    for name, cost, floor, read in rows:
        if not floor or read is None:
            continue
        due = {"memory": MEMORY_WALL, "disk": DISK_WALL, "slow store": SLOW_WALL}
        wall = due[name.partition(",")[0]]
        out.append(_bar(f"{name}, wall", cost.wall / floors[floor].wall, wall, floor))
        if (alike := floor + CHECKED) in floors:
            out.append(
                f"  {cost.wall / floors[alike].wall:.3f} x {alike}, which is itself "
                f"{floors[alike].wall / floors[floor].wall:.3f} x {floor}"
            )
        if name.startswith("memory"):
            out.append(_bar(f"{name}, CPU", cost.cpu / floors[floor].cpu, MEMORY_CPU, floor))
        out.append(_bar(f"{name}, read", read, READ, "bytes needed"))
    out.append(
        f"killed process: {killed.start:.3f} s until the next one runs, {killed.memory:.3f} s for "
        f"its memory; " + _bar("its bytes", killed.back, BACK, "second")
    )
    return out


def _bar(what: str, value: float, bound: float, unit: str) -> str:
    held = "yes" if value <= bound else "NO"
    return f"{what}: {value:.3f} of at most {bound:g} x {unit}: {held}"
