"""The loss of learners over that of data parallelism, after a common start, by cell of a grid.

    python -m benchmarks.runtime.outer_grid run --out grid.jsonl
    python -m benchmarks.runtime.outer_grid table --out grid.jsonl

Every run of a seed begins with the same weights, those of `BASE_STEPS` steps of data parallelism,
without any optimizer state and without a warm-up. So the gap is none of the start. `STEPS` inner
steps follow, of which each length of a round in `EVERY` is a divisor. The inner rate is the best
of `RATES` for data parallelism. The outer optimizer of a cell is the best of `UPDATES` for its
learners and for the length of a round in `TUNED`. Both are chosen on a seed of their own. Results
are added to the file as they come, and a second call continues after them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor

from benchmarks.runtime.outer_rounds import DOCS, SEEDS, STUDENT_T_95, train
from holdfast.config.run import RunConfig

STEPS, BASE_STEPS, LENGTH, BATCH, HELD_OUT = 600, 600, 32, 32, 2048
OPTIMIZERS = ("adamw", "muon")
LEARNERS, EVERY = (2, 4, 8), (10, 25, 30, 50, 100)
TUNED = {10: 30, 25: 30, 30: 30, 50: 100, 100: 100}
"""by inner steps of a round: those with which its outer optimizer was chosen"""
TUNING_SEED = 4
RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
UPDATES: tuple[dict[str, Any], ...] = (
    {"name": "sgd", "learning_rate": 1.0},
    {"name": "nesterov", "learning_rate": 0.7, "momentum": 0.6},
    {"name": "nesterov", "learning_rate": 1.0, "momentum": 0.6},
    {"name": "nesterov", "learning_rate": 0.7, "momentum": 0.8},
)


def _config(
    seed: int,
    steps: int,
    optimizer: str,
    rate: float,
    schedule: dict[str, Any],
    outer: dict[str, Any],
) -> RunConfig:
    """steps: inner ones. outer: without `learners`, data parallelism."""
    shape = {"layers": 2, "dim": 48, "heads": 2, "kv_heads": 2, "ffn_dim": 96, "vocab_size": 256}
    return RunConfig.model_validate(
        {
            "seed": seed,
            "data": {"sequence_length": LENGTH},
            "model": {"preset": None, **shape, "tied_embeddings": True},
            "train": {
                "steps": steps // outer.get("every_steps", 1),
                "batch_size": BATCH,
                "microbatch_size": BATCH // max(1, outer.get("learners", 0)),
                "optimizer": {"name": optimizer, "learning_rate": rate},
                "schedule": schedule,
            },
            "outer": outer,
        }
    )


class Grid:
    """Losses by key, which a file keeps."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text().splitlines() if path.exists() else ()
        self.losses: dict[str, float] = dict(json.loads(line) for line in lines)
        self._bases: dict[tuple[str, int, float], list[Tensor]] = {}

    def loss(self, optimizer: str, seed: int, rate: float, outer: dict[str, Any]) -> float:
        """Return the loss of a run, which is trained if the file has none."""
        key = json.dumps([optimizer, seed, rate, outer])
        if key not in self.losses:
            base = [tensor.clone() for tensor in self._base(optimizer, seed, rate)]
            schedule = {"kind": "cosine", "warmup_steps": 0, "final_ratio": 0.0}
            config = _config(seed + 1000, STEPS, optimizer, rate, schedule, outer)
            self.losses[key] = train(config, base, held_out=HELD_OUT)
            with self.path.open("a") as file:
                file.write(json.dumps([key, self.losses[key]]) + "\n")
        return self.losses[key]

    def _base(self, optimizer: str, seed: int, rate: float) -> list[Tensor]:
        """The weights that all runs of a seed begin with."""
        if (optimizer, seed, rate) not in self._bases:
            weights = self._bases[optimizer, seed, rate] = []
            schedule = {"kind": "constant", "warmup_steps": 30}
            train(_config(seed, BASE_STEPS, optimizer, rate, schedule, {}), weights)
        return self._bases[optimizer, seed, rate]

    def best_rate(self, optimizer: str) -> float:
        """Return the inner rate that is best for data parallelism."""
        return min(RATES, key=lambda rate: self.loss(optimizer, TUNING_SEED, rate, {}))

    def best_update(self, optimizer: str, learners: int, every: int) -> dict[str, Any]:
        """Return the outer optimizer that is best on the tuning seed."""
        rate = self.best_rate(optimizer)
        cell = {"learners": learners, "every_steps": TUNED[every]}

        def loss(update: dict[str, Any]) -> float:
            return self.loss(optimizer, TUNING_SEED, rate, cell | {"optimizer": update})

        return min(UPDATES, key=loss)

    def cell(self, optimizer: str, learners: int, every: int) -> str:
        """Return a line of the table."""
        rate, update = self.best_rate(optimizer), self.best_update(optimizer, learners, every)
        outer = {"learners": learners, "every_steps": every, "optimizer": update}
        over = []
        for seed in SEEDS:
            base = self.loss(optimizer, seed, rate, {})
            over.append(100 * (self.loss(optimizer, seed, rate, outer) / base - 1))
        half = STUDENT_T_95 * stdev(over) / len(over) ** 0.5
        shown = ", ".join(str(value) for value in update.values())
        return f"| {learners} | {every} | {mean(over):+.2f} % +- {half:.2f} | {shown} |"


def cells() -> Iterator[tuple[str, int, int]]:
    """Yield (optimizer, learners, inner steps of a round), those with a bound first."""
    first = [(2, 30), (2, 100), (8, 30)]
    others = [cell for cell in product(LEARNERS, EVERY) if cell not in first]
    for group in (first, others):
        for optimizer, cell in product(OPTIMIZERS, group):
            yield optimizer, *cell


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("run", "table"))
    parser.add_argument("--out", type=Path, default=Path("grid.jsonl"), help="file of the losses")
    given = parser.parse_args()
    torch.set_num_threads(1)
    grid = Grid(given.out)
    if given.what == "run":
        print(f"{len(DOCS.sources[0]):,} bytes of text", flush=True)
        for optimizer, learners, every in cells():
            print(optimizer, grid.cell(optimizer, learners, every), flush=True)
        return
    for optimizer in OPTIMIZERS:
        rate = grid.best_rate(optimizer)
        base = mean(grid.loss(optimizer, seed, rate, {}) for seed in SEEDS)
        print(f"{optimizer}, rate {rate}: data parallel {base:.4f} nats a byte")
        for learners, every in product(LEARNERS, EVERY):
            print(grid.cell(optimizer, learners, every))


if __name__ == "__main__":
    main()
