"""What Holdfast does on all accelerators of a node, in one table and one file to send back.

    python -m benchmarks.runtime.gpus                            every row; some ten minutes
    python -m benchmarks.runtime.gpus --only tp                  one row; may be given several times
    python -m benchmarks.runtime.gpus --device cpu --quick       tiny sizes: does it run?
    python -m benchmarks.runtime.gpus --device cpu --quick --workers 2

The rows of layouts train a small model in float64, undisturbed and with a worker killed, and
compare losses, ledger and weights with one worker. Replicas have its bits. A layout that the number
of devices does not allow says so. `docs/guide/accelerators.md` says what the rows mean, and what
ran.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from benchmarks.runtime.accelerator.settings import RowResult, Settings
from benchmarks.runtime.accelerator.table import Row, Suite

LAYOUTS = ("dp", "dp-gathered", "dp_shard", "zero-1", "tp", "pp", "pp-tp", "dp_shard-tp")
"""In the order of `several.LAYOUTS`."""
KILLED = tuple(f"{name}-killed" for name in ("dp", "dp-gathered", "dp_shard", "tp", "pp"))

ROWS = (
    Row("environment", 60),
    Row("links", 60, on_cpu=False),
    Row("collectives", 180),
    Row("data", 60),
    Row("alone", 300, needs="data"),
    *(Row(name, 300, needs="alone") for name in (*LAYOUTS, *KILLED)),
)


def perform(name: str, settings: Settings) -> RowResult:
    """Do a row's work."""
    from benchmarks.runtime.accelerator import floors, runs, several

    works: dict[str, Callable[[], RowResult]] = {
        "environment": lambda: floors.environment(settings),
        "links": lambda: several.links(settings),
        "collectives": lambda: several.collectives(settings),
        "data": lambda: runs.data(settings),
        "alone": lambda: several.alone(settings),
    }
    if name in works:
        return works[name]()
    layout = several.LAYOUTS[LAYOUTS.index(name.removesuffix("-killed"))]
    work = several.killed if name in KILLED else several.parity
    return work(settings, layout)


SUITE = Suite(
    "benchmarks.runtime.gpus", (__doc__ or "").splitlines()[0], ROWS, perform, is_for_several=True
)

if __name__ == "__main__":
    sys.exit(SUITE.main())
