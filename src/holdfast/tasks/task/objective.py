"""The module of a user's task and its loss in one module, as FSDP2 and the executor need it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from holdfast.errors import TaskError
from holdfast.tasks.task.module import put_buffer, seed_generators
from holdfast.tasks.task.task import Task

BufferVersions = Mapping[str, tuple[Tensor, int]]


class TaskObjective(nn.Module):
    """From a microbatch to its loss sum, a float64 scalar.

    Each forward pass draws its random numbers from a seed of its own. So they do not depend on
    the rank that computes it, nor on the time.

    compute: dtype of the parameters in the pass, and of the batch's floating-point tensors.
    merged: memory of the buffers that the pass changes, with a dim for a scalar. Each pass begins
        with the values before the step, and leaves its changes in `grad` here, from where they are
        summed as gradients are. The owner sets it, once there is memory.
    always_used: parameters that get a gradient in each pass, which may be zero. FSDP2 reduces those
        that have one, and its shards must do so alike.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        compute: torch.dtype,
        always_used: Collection[str] = (),
    ) -> None:
        super().__init__()
        self.model = model
        self.merged: dict[str, Tensor] = {}
        self._task, self._compute = task, compute
        self._always_used = tuple(always_used)

    def forward(self, batch: Mapping[str, Tensor], key: int) -> Tensor:
        """batch: empty for a microbatch that is skipped. Raises TaskError."""
        if not batch:
            device = next(self.parameters()).device
            return torch.zeros((), dtype=torch.float64, device=device, requires_grad=True)
        before = buffer_versions(self.model)
        for name in self.merged:
            put_buffer(self.model, name, before[name][0].clone())
        seed_generators(key)
        try:
            loss = self._task.loss(self.model, {name: self._cast(t) for name, t in batch.items()})
            self._check(loss)
            if torch.is_grad_enabled():
                self._keep_changes()
        finally:
            for name in self.merged:
                put_buffer(self.model, name, before[name][0])
        if name := changed_buffer(self.model, before):
            raise changed_buffer_error(name)
        return loss.to(torch.float64) + self._zero()

    def _zero(self) -> Tensor | float:
        """A zero that depends on the parameters that are always used."""
        nothing = [self.model.get_parameter(n).reshape(-1)[:0] for n in self._always_used]
        return torch.cat(nothing).sum().to(torch.float64) if nothing else 0.0

    def _keep_changes(self) -> None:
        """Add what the pass changed in merged buffers to their `grad`."""
        for name, held in self.merged.items():
            change = self.model.get_buffer(name).detach().view(held.shape) - held
            held.grad = change if held.grad is None else held.grad + change

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._compute) if tensor.is_floating_point() else tensor

    def _check(self, loss: Tensor) -> None:
        if not isinstance(loss, Tensor) or loss.shape != ():
            what = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise TaskError(f"loss() returned {what}", remedy="return a scalar")
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise TaskError(
                "the loss depends on no parameter that is trained",
                remedy="compute it from the output of the module that loss() is given",
            )


def buffer_versions(module: nn.Module) -> BufferVersions:
    """The buffers, and how often each was changed in place."""
    return {name: (buffer, buffer._version) for name, buffer in module.named_buffers()}


def changed_buffer(module: nn.Module, before: BufferVersions) -> str:
    """Return the name of a buffer that was changed or replaced since then; "" for none."""
    for name, buffer in module.named_buffers():
        was, version = before.get(name, (None, -1))
        if buffer is not was or buffer._version != version:
            return name
    return ""


def changed_buffer_error(name: str) -> TaskError:
    """A buffer that a forward pass changes."""
    return TaskError(
        f"the forward pass changes buffer {name}, so the state would depend on which rank computes "
        "what",
        remedy="keep it unchanged, or let merge() say how its changes are put together",
    )
