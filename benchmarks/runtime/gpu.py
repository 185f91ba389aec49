"""What Holdfast does on one accelerator, in one table and one file that a person can send back.

    python -m benchmarks.runtime.gpu                        every row; at most ten minutes on a card
    python -m benchmarks.runtime.gpu --only bits            one row; may be given several times
    python -m benchmarks.runtime.gpu --device cpu --quick   tiny sizes: does it run?
    HOLDFAST_GPU_PROFILE=FOLDER python -m benchmarks.runtime.gpu --only 1b-mb4
        its kernels too, as a text

Correctness comes first, then speed. `docs/guide/accelerators.md` says what the rows mean, and what
ran. `benchmarks/runtime/accelerator/table.py` says what a row that fails prints.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from benchmarks.runtime.accelerator.settings import RowResult, Settings
from benchmarks.runtime.accelerator.table import Row, Suite

SHAPES = ("1b-mb4", "1b-mb4-not-deterministic", "1b-mb4-eager", "1b-mb2", "1b-mb8", "1b-fp8")
"""In the order of `shape.VARIANTS`."""

ROWS = (
    Row("environment", 60),
    Row("doctor", 60),
    Row("data", 60),
    Row("bits", 240, "correct"),
    Row("parity", 240, "correct"),
    Row("non-finite", 60, "correct"),
    Row("same-bits", 240, "correct"),
    Row("experts", 120, "correct"),
    Row("spread-attention", 60, "correct"),
    Row("runs-fp32", 240, "correct", needs="data"),
    Row("runs-bf16-compiled", 240, "correct", on_cpu=False, needs="data"),
    Row("runs-keys", 240, "correct", needs="data"),
    Row("runs-own-code", 240, "correct", on_cpu=False),
    Row("shared-card", 400, needs="data"),
    Row("start", 60),
    Row("floors", 60),
    Row("capture", 90),
    Row(SHAPES[0], 150),
    *(Row(name, 120, on_cpu=False) for name in SHAPES[1:]),
    Row("plan", 240),
    Row("1b-memory", 300),
    Row("train-1b", 300, on_cpu=False, needs="data"),
    Row("peers", 900),
)


def perform(name: str, settings: Settings) -> RowResult:
    """Do a row's work."""
    from benchmarks.runtime.accelerator import (
        correct,
        floors,
        memory,
        planned,
        rivals,
        runs,
        shape,
        shared,
    )

    quick = settings.quick
    ways = ("killed", "noticed") if quick else ("killed", "standby", "stopped", "noticed", "lost")
    works: dict[str, Callable[[], RowResult]] = {
        "environment": lambda: floors.environment(settings),
        "start": lambda: floors.start(settings),
        "floors": lambda: floors.floors(settings),
        "capture": lambda: floors.capture(settings),
        "bits": lambda: correct.bits(settings),
        "parity": lambda: correct.parity(settings),
        "non-finite": lambda: correct.non_finite(settings),
        "same-bits": lambda: memory.same_bits(settings),
        "experts": lambda: correct.experts(settings),
        "spread-attention": lambda: correct.spread_attention(settings),
        "plan": lambda: planned.planned(settings),
        "1b-memory": lambda: memory.shape_memory(settings),
        "shared-card": lambda: shared.shared_card(settings),
        "doctor": lambda: runs.doctor(settings),
        "data": lambda: runs.data(settings),
        "peers": lambda: rivals.peers(settings),
        "train-1b": lambda: runs.train_1b(settings),
        "runs-fp32": lambda: runs.same_bits(settings, "fp32", ways),
        "runs-keys": lambda: runs.with_keys(settings),
        "runs-own-code": lambda: runs.own_code(settings),
        "runs-bf16-compiled": lambda: runs.same_bits(
            settings, "bf16", precision="bf16", compile=True
        ),
    }
    if name in SHAPES:
        return shape.train_shape(settings, shape.VARIANTS[SHAPES.index(name)])
    return works[name]()


SUITE = Suite("benchmarks.runtime.gpu", (__doc__ or "").splitlines()[0], ROWS, perform)

if __name__ == "__main__":
    sys.exit(SUITE.main())
