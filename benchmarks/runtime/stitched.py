"""The loss of models that were trained apart and stitched, against joint training.

    python -m benchmarks.runtime.stitched

A byte model trains `BASE` steps on two domains, this repository's docs and its source. Then each
branch trains `STEPS` steps with half of the batch on one domain. Joint training has as many tokens
and steps, with the complete batch on both domains. `holdfast stitch` makes one model of the
branches. The mixture trains `ROUTER` more steps on both domains, and what is compared with it too.
The loss is that of both domains' held-out texts, in nats a byte.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from benchmarks.runtime.outer_rounds import DOCS, SEEDS, STUDENT_T_95, Texts, bytes_of, train
from holdfast.config.run import RunConfig
from holdfast.config.sections.model import ModelConfig
from holdfast.core.sharding.parameters import decoder_parameters
from holdfast.export.stitched import StitchRequest, stitch
from holdfast.model.huggingface import export_folder, import_folder

LENGTH, BATCH, HELD_OUT, RATE = 32, 32, 2048, 4e-3
SHAPE = {"layers": 2, "dim": 48, "heads": 2, "kv_heads": 2, "ffn_dim": 96, "vocab_size": 256}
DOMAINS = (DOCS.sources[0], bytes_of("src", "*.py"))
BOTH = Texts(DOMAINS)


class Trainer:
    """Trains a model of a shape, step after step. weights: in the order of the parameters."""

    def __init__(self, seed: int, shape: ModelConfig, weights: list[Tensor]) -> None:
        self.seed, self.shape = seed, shape
        self.weights = [tensor.clone() for tensor in weights]

    def train(self, steps: int, batch: int, texts: Texts) -> float:
        """Return the loss after some steps."""
        self.seed += 1
        return train(self._config(steps, batch), self.weights, texts, HELD_OUT)

    def loss(self) -> float:
        """Return the loss of the model as it is, on both domains."""
        return train(self._config(1, BATCH), list(self.weights), BOTH, HELD_OUT, steps=0)

    def _config(self, steps: int, batch: int) -> RunConfig:
        return RunConfig.model_validate(
            {
                "seed": self.seed,
                "data": {"sequence_length": LENGTH},
                "model": self.shape.model_dump(),
                "train": {
                    "steps": steps,
                    "batch_size": batch,
                    "microbatch_size": batch,
                    "optimizer": {"learning_rate": RATE},
                    "schedule": {"kind": "cosine", "warmup_steps": min(30, steps)},
                },
            }
        )

    def write(self, folder: Path) -> str:
        """Write the model's folder; its path."""
        rows = decoder_parameters(self.shape)
        named = {row.name: tensor for row, tensor in zip(rows, self.weights, strict=True)}
        export_folder(folder, self.shape, named, None)
        return str(folder)


def _stitched(seed: int, branches: list[Trainer], method: Any, folder: Path) -> Trainer:
    sources = tuple(branch.write(folder / f"{method}-{at}") for at, branch in enumerate(branches))
    to = folder / method
    stitch(StitchRequest(sources, to, method, (), (), 2, seed), print)
    shape, tensors = import_folder(to)
    return Trainer(seed + 100, shape, [tensors[row.name] for row in decoder_parameters(shape)])


def compare(seed: int, base_steps: int, steps: int, router: int) -> Iterator[tuple[str, float]]:
    """Yield what was trained, and its loss."""
    base = Trainer(seed * 1000, ModelConfig.model_validate({"preset": None, **SHAPE}), [])
    base.train(base_steps, BATCH, BOTH)
    branches = [Trainer(base.seed + 10 * at, base.shape, base.weights) for at in (1, 2)]
    for branch, domain in zip(branches, DOMAINS, strict=True):
        branch.train(steps, BATCH // len(DOMAINS), Texts((domain,)))
    joint = Trainer(base.seed + 30, base.shape, base.weights)
    yield "joint", joint.train(steps, BATCH, BOTH)
    for name, branch in zip(("docs", "source"), branches, strict=True):
        yield f"branch of {name}", branch.loss()
    with TemporaryDirectory() as folder:
        place = Path(folder)
        average = _stitched(seed, branches, "average", place)
        yield "average", average.loss()
        yield "average, then router steps", average.train(router, BATCH, BOTH)
        mixture = _stitched(seed, branches, "experts", place)
        yield "experts", mixture.loss()
        yield "experts, then router steps", mixture.train(router, BATCH, BOTH)
    with TemporaryDirectory() as folder:
        upcycled = _stitched(seed, [base, base], "experts", Path(folder))
    upcycled.train(steps, BATCH, BOTH)
    yield "joint mixture, then router steps", upcycled.train(router, BATCH, BOTH)
    yield "joint, then router steps", joint.train(router, BATCH, BOTH)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=int, default=400, help="steps before the branches")
    parser.add_argument("--steps", type=int, default=400, help="steps of a branch")
    parser.add_argument("--router", type=int, default=100, help="steps of the stitched model")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {}
    for seed in SEEDS:
        for name, loss in compare(seed, given.base, given.steps, given.router):
            found.setdefault(name, []).append(loss)
            print(f"seed {seed}  {name:34} {loss:.4f}", flush=True)
    for name, losses in found.items():
        after = "router" in name
        joint = found["joint, then router steps" if after else "joint"]
        over = [100 * (loss / other - 1) for loss, other in zip(losses, joint, strict=True)]
        half = STUDENT_T_95 * stdev(over) / len(over) ** 0.5
        print(f"{name:34} {mean(losses):.4f} nats a byte, {mean(over):+.1f} % +- {half:.1f}")


if __name__ == "__main__":
    main()
