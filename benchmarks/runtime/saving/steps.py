"""Real training steps right after a save, and without one: in turns, in one process.

The step is plain PyTorch for every way of saving: our decoder under DistributedDataParallel and
`torch.optim.AdamW`. The state is parameters and both moments.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.work import MeanLoss, Work
from benchmarks.runtime.saving.task import Task, Way


class Trainer:
    """One rank's model, optimizer and batches."""

    def __init__(self, rank: int, task: Task) -> None:
        self._work = work = Work(**task.shape)
        decoder = work.decoder()
        self._model = DistributedDataParallel(MeanLoss(decoder))
        self._optimizer = work.adamw(decoder)
        self._rank, self._share, self._step = rank, work.batch // task.world, 0
        self.train(None)  # makes the moments
        self.state: Mapping[str, Tensor] = {
            f"{kind}.{name}": tensor
            for name, parameter in decoder.named_parameters()
            for kind, tensor in (
                ("model", parameter.detach()),
                ("exp_avg", self._optimizer.state[parameter]["exp_avg"]),
                ("exp_avg_sq", self._optimizer.state[parameter]["exp_avg_sq"]),
            )
        }

    def pairs(self, way: Way, pairs: int, number: Callable[[], int]) -> dict[str, Any]:
        """Wall seconds of a step with the save before it, and of one without, in turns. `blocked`:
        of the former, seconds in which training was blocked."""
        found: dict[str, Any] = {"with": [], "without": [], "blocked": []}
        for turn in range(pairs + 1):
            for saves in (turn % 2 == 0, turn % 2 == 1):
                dist.barrier()
                begun = time.perf_counter()
                blocked = self._saved_step(way, number) if saves else self.train(None)
                wall = time.perf_counter() - begun
                way.finish()  # its end must not fall into the next step
                if not turn:
                    continue  # the first save sets things up
                found["with" if saves else "without"].append(wall)
                if saves:
                    found["blocked"].append(blocked)
        return found

    def _saved_step(self, way: Way, number: Callable[[], int]) -> float:
        begun = time.perf_counter()
        way.begin(number())
        return time.perf_counter() - begun + self.train(way)

    def train(self, way: Way | None) -> float:
        """Do one step; return the seconds for which it was blocked before the update."""
        whole = self._work.tokens[self._step % self._work.distinct]
        mine = whole[self._rank * self._share :][: self._share]
        self._step += 1
        self._optimizer.zero_grad(set_to_none=False)
        loss: Tensor = self._model(mine[:, :-1].contiguous(), mine[:, 1:].contiguous())
        loss.backward()
        begun = time.perf_counter()
        if way is not None:
            way.fence()
        blocked = time.perf_counter() - begun
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._work.clip_norm)
        self._optimizer.step()
        return blocked
