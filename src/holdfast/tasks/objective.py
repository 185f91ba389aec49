"""The module of a user's task and its loss in one module, as FSDP2 and the executor need it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from holdfast.errors import TaskError
from holdfast.tasks.task import Task


class TaskObjective(nn.Module):
    """From a microbatch to its loss sum, a float64 scalar.

    Each forward pass draws its random numbers from a seed of its own. So they do not depend on
    the rank that computes it, nor on the time.

    compute: dtype of the parameters in the pass, and of the batch's floating-point tensors.
    """

    def __init__(self, task: Task, model: nn.Module, compute: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self._task, self._compute = task, compute

    def forward(self, batch: Mapping[str, Tensor], key: int) -> Tensor:
        """batch: empty for a microbatch that is skipped. Raises TaskError."""
        if not batch:
            device = next(self.parameters()).device
            return torch.zeros((), dtype=torch.float64, device=device, requires_grad=True)
        before = {name: buffer._version for name, buffer in self.model.named_buffers()}
        torch.manual_seed(key)
        loss = self._task.loss(self.model, {name: self._cast(t) for name, t in batch.items()})
        self._check(loss)
        for name, buffer in self.model.named_buffers():
            if buffer._version != before.get(name, -1):
                raise changed_buffer_error(name)
        return loss.to(torch.float64)

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._compute) if tensor.is_floating_point() else tensor

    def _check(self, loss: Tensor) -> None:
        if not isinstance(loss, Tensor) or loss.shape != ():
            what = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise TaskError(f"loss() returned {what}", where="task", remedy="return a scalar")
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise TaskError(
                "the loss depends on no parameter that is trained",
                where="task",
                remedy="compute it from the output of the module that loss() is given",
            )


def changed_buffer_error(name: str) -> TaskError:
    """A buffer that a forward pass changes."""
    return TaskError(
        f"the forward pass changes buffer {name}, so the state would depend on which rank computes "
        "what",
        where="task",
        remedy="keep it unchanged (a norm of a batch: track_running_stats=False)",
    )
