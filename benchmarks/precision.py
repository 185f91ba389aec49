"""Losses of bf16 and fp16 against fp32, on the quickstart's data and model.

    python -m benchmarks.precision                  400 steps in each precision, one worker
    python -m benchmarks.precision --steps 100

Each run has the same seed, batches and initial weights. The loss is smoothed by a mean over the
last `WINDOW` steps. The table has the largest relative difference of the smoothed loss from
fp32's, that of the last step, and the steps that fp16 skipped.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tests.support.commands import within

from holdfast.events import StepDone
from holdfast.wire.journal import read_journal
from holdfast.wire.store.run_store import FolderStore

RUN_FILE = Path(__file__).parents[1] / "examples/quickstart/run.yaml"
WINDOW = 20
"""Steps of the mean that smooths a loss."""


@dataclass(frozen=True)
class Curve:
    """The loss of each step in one precision, and the steps that were skipped."""

    losses: tuple[float, ...]
    skipped: tuple[int, ...]


def curve_of(precision: str, steps: int, folder: Path, settings: Sequence[str] = ()) -> Curve:
    """Train the quickstart, and read the curve from its journal."""
    done = within(
        "train",
        RUN_FILE,
        f"folder={folder / precision}",
        f"data.folder={folder / 'dataset'}",
        f"train.precision={precision}",
        f"train.steps={steps}",
        "train.evaluate.every=0",
        "layout.workers=1",
        *settings,
    )
    if done.code:
        raise SystemExit(done.err)
    events = [record.event for record in read_journal(FolderStore(folder / precision))]
    found = {event.step: event for event in events if isinstance(event, StepDone)}
    losses = tuple(found[step].loss for step in sorted(found))
    return Curve(losses, tuple(step for step in sorted(found) if found[step].skipped_at))


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
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as folder:
        curves = {p: curve_of(p, steps, Path(folder)) for p in ("fp32", "bf16", "fp16")}
    reference = curves["fp32"].losses
    print("precision  last loss  largest difference  last difference  skipped steps")
    for precision, curve in curves.items():
        found = differences(curve.losses, reference)
        last = smoothed(curve.losses)[-1]
        figures = f"{last:9.4f}  {found.max():18.4%}  {found[-1]:15.4%}"
        print(f"{precision:9}  {figures}  {list(curve.skipped)}")


if __name__ == "__main__":
    main()
