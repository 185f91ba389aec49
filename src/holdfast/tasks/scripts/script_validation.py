"""The validation that a script has named: its samples, and its loss of each microbatch.

The evaluator deals the microbatches and sums by the fixed tree, as for other runs
(`training/engine/evaluate.py`). The script's function runs in the runner's thread, while the script
waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from holdfast.core.weights import read_weight
from holdfast.errors import TaskError
from holdfast.tasks.scripts.own_loop import NamedValidation, Run
from holdfast.tasks.task.batches import TaskMicrobatch
from holdfast.tasks.task.module import evaluation_mode, seed_generators
from holdfast.tasks.task.objective import buffer_versions, changed_buffer
from holdfast.tasks.task.task import Batch, Samples, Task
from holdfast.tasks.task.validation import TaskValidation


class ValidationTask(Task):
    """A script's validation samples, as a task has them."""

    def __init__(self, named: NamedValidation | None) -> None:
        self._named = named

    def model(self) -> nn.Module:
        raise RuntimeError("the script has the module")

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        raise RuntimeError("the script computes its losses")

    def validation(self) -> Samples | None:
        return None if self._named is None else cast(Samples, self._named.dataset)

    def collate(self, items: Sequence[Any]) -> Batch:
        own = None if self._named is None else self._named.collate
        return super().collate(items) if own is None else own(items)

    def weight(self, batch: Batch) -> int:
        """The script says it with the loss."""
        return 0


@dataclass
class ScriptPart:
    """A microbatch of the validation. tokens: its weight, once its loss is computed."""

    read: TaskMicrobatch
    run: Run
    tokens: float = 0

    def loss(self) -> Tensor:
        """Compute the loss sum. Raises TaskError, and what the script raises."""
        named, kept = self.run.named_validation, self.run.kept
        assert named is not None, "there are microbatches"
        buffers = buffer_versions(kept.module)
        seed_generators(self.read.key)
        found = named.loss({name: self.run._cast(t) for name, t in self.read.tensors.items()})
        loss, self.tokens = _checked(found)
        if name := changed_buffer(kept.module, buffers):
            raise TaskError(
                f"the function of run.validate() changes buffer {name}",
                where="run.validate",
                remedy="compute the loss alone in it: the module is in evaluation mode",
            )
        return loss.detach().to(torch.float64)


class ScriptValidation:
    """Evenly spread samples of the dataset of `run.validate`; none without one."""

    tokens: int | None = None  # the script says it with each loss

    def __init__(self, run: Run, samples: int, microbatch_size: int, seed: int) -> None:
        self._run = run
        task = ValidationTask(run.named_validation)
        self._read = TaskValidation(task, samples, microbatch_size, seed)

    @property
    def microbatches(self) -> int:
        return self._read.microbatches

    def part(self, index: int, part: int, parts: int, device: torch.device) -> ScriptPart:
        return ScriptPart(self._read.part(index, part, parts, device), self._run)

    def bits_per_byte(self, nats: float) -> None:
        """The data need not be text."""


def compute_losses(
    module: nn.Module, parts: Sequence[ScriptPart], on_progress: Callable[[], None]
) -> list[Tensor]:
    """The loss sums, in evaluation mode and without gradients."""
    losses = []
    with evaluation_mode(module), torch.no_grad():
        for part in parts:
            on_progress()
            losses.append(part.loss())
    return losses


def _checked(found: Any) -> tuple[Tensor, float]:
    match found:
        case Tensor() as loss, given if loss.shape == ():
            weight = read_weight(given)
            if weight is not None:
                return loss, weight
    raise TaskError(
        f"the function of run.validate() returned {_described(found)}",
        where="run.validate",
        remedy="return the loss as a sum, a scalar, and its weight, a number from 0 on",
    )


def _described(found: Any) -> str:
    if isinstance(found, tuple):
        return f"({', '.join(map(_described, found))})"
    return f"shape {list(found.shape)}" if isinstance(found, Tensor) else repr(found)[:80]
