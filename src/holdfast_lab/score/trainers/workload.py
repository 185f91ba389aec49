"""What every trainer trains at level 1 of `holdfast score`: a tiny model, and steps that take time.

The global batch of step N is `MICROBATCHES` microbatches of `SAMPLES` samples, samples
N x 24 to N x 24 + 23 of the order. A microbatch computes almost nothing. It takes the given time
because the process sleeps, as if it waited for an accelerator. So four workers on two cores run
like four machines. The process sleeps in short parts and counts them. If it is stopped meanwhile
(SIGSTOP), the part that was stopped does not count.

Variables of the environment:

    HOLDFAST_SCORE_MICROBATCH_S   seconds of a microbatch
    HOLDFAST_SCORE_LINES          the file into which loops of other trainers write
    HOLDFAST_SCORE_BETWEEN_S      seconds between interruptions, for an interval of saves
    HOLDFAST_SCORE_SAVE_S         seconds of a save, until one was measured
    HOLDFAST_SCORE_RESILIENT      0: save nothing
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import holdfast

MICROBATCHES, SAMPLES = 12, 2
BATCH = MICROBATCHES * SAMPLES
WIDTH = 16
_PART_S = 0.005  # seconds of one part of the sleep


def microbatch_seconds() -> float:
    return float(os.environ.get("HOLDFAST_SCORE_MICROBATCH_S", "0"))


def is_resilient() -> bool:
    return os.environ.get("HOLDFAST_SCORE_RESILIENT", "1") != "0"


def sample(index: int) -> tuple[Tensor, Tensor]:
    """x [WIDTH] and y [1] of a sample of the global order."""
    x = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
    return x, x.square().mean(0, keepdim=True)


def samples(start: int, stop: int) -> tuple[Tensor, Tensor]:
    """x [stop - start, WIDTH] and y [stop - start, 1]."""
    pairs = [sample(index) for index in range(start, stop)]
    return torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])


def module() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 1))


def summed_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The sum over samples; takes the time of a microbatch."""
    seconds = microbatch_seconds()
    # Sleep for so long, without the time for which the process was stopped.
    passed, now = 0.0, time.monotonic()
    while passed < seconds:
        time.sleep(min(_PART_S, seconds - passed))
        before, now = now, time.monotonic()
        passed += min(now - before, 4 * _PART_S)
    return F.mse_loss(model(x), y, reduction="sum")


class Points:
    """Samples made from their index."""

    version = "score-1"

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        x, y = sample(index)
        return {"x": x, "y": y}


class ScoreTask(holdfast.Task):
    """The workload as a task of Holdfast."""

    def model(self) -> nn.Module:
        return module()

    def data(self) -> Points:
        return Points()

    def loss(self, model: nn.Module, batch: holdfast.Batch) -> Tensor:
        return summed_loss(model, batch["x"], batch["y"])


class Lines:
    """The file in which the loop of another trainer reports each step, a JSON line each. One write
    makes a line, as several processes share the file."""

    def __init__(self) -> None:
        path = os.environ["HOLDFAST_SCORE_LINES"]
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(
        self,
        step: int,
        generation: int,
        rank: int,
        workers: int,
        ranges: list[tuple[int, int]],
        loss: float,
    ) -> None:
        """ranges: samples [start, stop) of this rank. loss: its sum over them."""
        row: dict[str, object] = {"t": time.time(), "step": step, "generation": generation}
        row |= {"rank": rank, "workers": workers, "samples": ranges, "loss": loss}
        os.write(self._file, (json.dumps(row) + "\n").encode())


def share_of(step: int, rank: int, world: int) -> list[tuple[int, int]]:
    """Samples of the microbatches of step `step` (from 1) that a rank computes, one range each."""
    first = (step - 1) * BATCH
    return [
        (first + m * SAMPLES, first + (m + 1) * SAMPLES) for m in range(rank, MICROBATCHES, world)
    ]
