"""Losses of bf16 and fp16, and of short optimizer state, against fp32. On the quickstart's data
and model.

    python -m benchmarks.runtime.precision            400 steps in each precision, one worker
    python -m benchmarks.runtime.precision --states   400 steps with each state_dtype
    python -m benchmarks.runtime.precision --states --rate 1e-3
    python -m benchmarks.runtime.precision --roundings    400 steps in fp32, rounded in other places
    python -m benchmarks.runtime.precision --float8   fp8 against bf16; torchao emulates it on a CPU
    python -m benchmarks.runtime.precision --quantized --seeds 3 --rate 1e-3 --steps 100
    python -m benchmarks.runtime.precision --steps 100

Each run has the same seed, batches and initial weights. The loss is smoothed by a mean over the
last `WINDOW` steps. The table has the largest relative difference of the smoothed loss from
fp32's, and that of the last step. It also has the loss on validation data, its difference, the
bytes of optimizer state per parameter, and the steps that fp16 skipped.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
from tests.support.commands import within

from holdfast.core.sharding.state_table import MODEL_PREFIX
from holdfast.events import Evaluated, StepDone
from holdfast.export.weights import choose_checkpoint
from holdfast.launch.run.runs import open_run
from holdfast.launch.start import machine
from holdfast.wire.journal import read_journal
from holdfast.wire.store.run_store import FolderStore

RUN_FILE = Path(__file__).parents[2] / "examples/quickstart/run.yaml"
WINDOW = 20
"""Steps of the mean that smooths a loss."""


Settings = dict[str, str]
"""Key of the run file -> value."""
PRECISIONS: dict[str, Settings] = {p: {"train.precision": p} for p in ("fp32", "bf16", "fp16")}
STATES: dict[str, Settings] = {
    **{f"{s} state": {"train.optimizer.state_dtype": s} for s in ("fp32", "bf16", "8bit")},
    "fp32, tp 2": {"layout.tp": "2", "layout.workers": "2"},
}
"""The last has other last bits in each sum, and shows how much a loss depends on them."""
ROUNDINGS: dict[str, Settings] = {
    "fp32": {},
    "tp 2": STATES["fp32, tp 2"],
    "mb 4": {"train.microbatch_size": "4"},
    "float64": {"train.precision": "float64"},
}
"""The same data, weights and formulas, with other last bits in each sum."""


FLOAT8: dict[str, Settings] = {p: {"train.precision": p} for p in ("bf16", "fp8")}
QUANTIZED: dict[str, Settings] = {
    name: {"layout.dp_shard": "2", "layout.workers": "2", "layout.quantized": name}
    for name in ("none", "weights", "gradients", "both")
}


@dataclass(frozen=True)
class Curve:
    """The loss of each step, that on validation data at the end, and the steps that were skipped.

    state_bytes: of the optimizer, per parameter.
    """

    losses: tuple[float, ...]
    validation: float
    skipped: tuple[int, ...]
    state_bytes: float


def curve_of(
    name: str, changes: Settings, steps: int, folder: Path, rate: float | None = None, seed: int = 1
) -> Curve:
    """Train the quickstart, and read the curve from its journal. In fp8 too, though the command
    refuses it on a CPU."""
    run = folder / f"{name.replace(', ', '-').replace(' ', '-')}-{seed}"
    if rate is not None:
        changes = changes | {"train.optimizer.learning_rate": str(rate)}
    machine.refuse_float8 = lambda loaded, machine: None  # type: ignore[attr-defined]
    done = within(
        "train",
        RUN_FILE,
        f"folder={run}",
        f"data.folder={folder / 'dataset'}",
        f"train.steps={steps}",
        f"seed={seed}",
        "train.evaluate.every=0",
        *[f"{key}={value}" for key, value in ({"layout.workers": "1"} | changes).items()],
    )
    if done.code:
        raise SystemExit(done.err)
    events = [record.event for record in read_journal(FolderStore(run))]
    found = {event.step: event for event in events if isinstance(event, StepDone)}
    (validation,) = [event.loss for event in events if isinstance(event, Evaluated)]
    return Curve(
        tuple(found[step].loss for step in sorted(found)),
        validation,
        tuple(step for step in sorted(found) if found[step].skipped_at),
        _state_bytes(run),
    )


def _state_bytes(run: Path) -> float:
    """Bytes of the optimizer's state in the last checkpoint, per parameter."""
    table = choose_checkpoint(open_run(run), None, lambda line: None).tensors
    parameters = sum(prod(row.shape) for row in table if row.name.startswith(MODEL_PREFIX))
    state = sum(row.nbytes for row in table if not row.name.startswith(MODEL_PREFIX))
    return state / parameters


def smoothed(losses: Sequence[float]) -> np.ndarray:
    """[n] -> [n - WINDOW + 1]: means over WINDOW losses"""
    return np.convolve(losses, np.full(WINDOW, 1 / WINDOW), mode="valid")


def differences(losses: Sequence[float], reference: Sequence[float]) -> np.ndarray:
    """Relative differences of the smoothed losses, from the first full window on."""
    found, expected = smoothed(losses), smoothed(reference)
    return np.abs(found - expected) / expected


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--states", action="store_true")
    parser.add_argument("--roundings", action="store_true")
    parser.add_argument("--float8", action="store_true")
    parser.add_argument("--quantized", action="store_true")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--rate", type=float, help="learning rate; without it, the quickstart's")
    given = parser.parse_args()
    sets = {"states": STATES, "roundings": ROUNDINGS, "quantized": QUANTIZED, "float8": FLOAT8}
    cases = next((of for key, of in sets.items() if getattr(given, key)), PRECISIONS)
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(1, given.seeds + 1):
            curves = {
                name: curve_of(name, changes, given.steps, Path(folder), given.rate, seed)
                for name, changes in cases.items()
            }
            print_curves(curves)


def print_curves(curves: dict[str, Curve]) -> None:
    """A line for each, compared with the first."""
    first = next(iter(curves.values()))
    print(
        "run         last loss  largest and last difference  validation  difference  bytes  skipped"
    )
    for name, curve in curves.items():
        found, last = differences(curve.losses, first.losses), smoothed(curve.losses)[-1]
        other = curve.validation / first.validation - 1
        print(
            f"{name:10}  {last:9.4f}  {found.max():16.3%} {found[-1]:10.3%}  "
            f"{curve.validation:10.4f}  {other:+10.3%}  {curve.state_bytes:5.3f}  "
            f"{list(curve.skipped)}"
        )


if __name__ == "__main__":
    main()
