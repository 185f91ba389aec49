"""Runs a task's passes; a validation is computed in evaluation mode, without dropout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.training.engine.executors import SingleStageExecutor


class TaskExecutor(SingleStageExecutor):
    """A `SingleStageExecutor` whose objective has modes."""

    def evaluate(self, batches: Sequence[Any], on_progress: Callable[[], None]) -> list[Tensor]:
        """Forward of each in evaluation mode; the loss sums. A part that does not count gives 0."""
        with evaluation_mode(self._objective):
            losses = super().evaluate(batches, on_progress)
        return [
            loss if batch.counts else torch.zeros_like(loss)
            for loss, batch in zip(losses, batches, strict=True)
        ]


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while. Each module gets its own mode back: a user may have frozen some
    in evaluation mode."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, is_training in modes:
            part.training = is_training
