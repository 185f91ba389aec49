"""Runs passes under the limit of the device: what they need of it is counted, next to the state.

On an accelerator its allocator tells the peak. On a CPU `tensor_account.py` counts tensors, which
makes a step slower. So passes are counted only if there is a limit. What a script's own thread
computes, and what is compiled on a CPU, is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from holdfast.config.sections.memory import DEVICE
from holdfast.training.engine.executors import Executor
from holdfast.training.engine.loss_scale import LossScale
from holdfast.training.engine.stage_work import GradientListener
from holdfast.training.memory.places import StateMemory
from holdfast.training.memory.tensor_account import TensorAccount


@dataclass
class _Peak:
    nbytes: int = 0


class MeteredExecutor:
    """An executor whose passes end the run if they need more of the device than its limit."""

    def __init__(self, executor: Executor, memory: StateMemory) -> None:
        self._executor, self._memory = executor, memory
        self._account = TensorAccount()  # one for all steps: FSDP2 keeps what it gathers into

    @property
    def loss_scale(self) -> LossScale:
        return self._executor.loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: LossScale) -> None:
        self._executor.loss_scale = scale

    def train(
        self,
        leaves: Sequence[int],
        batches: Sequence[Any],
        listener: GradientListener,
        losses: list[Tensor] | None = None,
    ) -> list[Tensor]:
        """As `Executor.train`. Raises StateMemoryError after passes that needed too much."""
        with self._measured() as peak:
            found = self._executor.train(leaves, batches, listener, losses)
        with self._memory.ledger.held(DEVICE, "activations", peak.nbytes):
            return found

    def evaluate(self, batches: Sequence[Any], on_progress: Callable[[], None]) -> list[Tensor]:
        """As `Executor.evaluate`. It needs less than a step."""
        return self._executor.evaluate(batches, on_progress)

    @contextmanager
    def _measured(self) -> Iterator[_Peak]:
        """Inside, tensors are made. Afterwards the most bytes that they took at once are known."""
        device, peak = self._memory.device, _Peak()
        if device.type == "cpu":
            self._account.reset_peak()
            with self._account:
                yield peak
            peak.nbytes = self._account.peak
            return
        before = int(torch.accelerator.memory_allocated(device))
        torch.accelerator.reset_peak_memory_stats(device)
        yield peak
        peak.nbytes = max(0, int(torch.accelerator.max_memory_allocated(device)) - before)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)
