"""The values of a task's parameters and buffers before the first step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from holdfast.core.sharding.adapters import DOWN, UP, adapter_init
from holdfast.core.sharding.parameters import Parameter
from holdfast.errors import TaskError
from holdfast.model.init import initial_tensor
from holdfast.tasks.loading import user_code
from holdfast.tasks.module import own_values, table_shape
from holdfast.tasks.task import Task


def first_values(task: Task, seed: int) -> Callable[[Parameter], Tensor]:
    """What `Task.initial` says, or what the module gave its parameters when it was made."""
    given: dict[str, Tensor] = {}

    def value(row: Parameter) -> Tensor:
        with user_code(f"initial() failed for {row.name}"):
            answer = None if row.merge else task.initial(row.name, row.shape)
        if answer is None:
            if not given:
                own = own_values(task, seed)
                buffers = {n: b.view(table_shape(b)) for n, b in own.buffers.items()}
                given.update(own.parameters | buffers)
            answer = given[row.name]
        if not isinstance(answer, Tensor):
            answer = initial_tensor(replace(row, init=answer), seed)
        if tuple(answer.shape) != row.shape:
            raise TaskError(
                f"the initial values of {row.name} are {list(answer.shape)}, "
                f"and it is {list(row.shape)}",
                where="task",
            )
        return answer

    return value


def first_adapter(row: Parameter, seed: int) -> Tensor:
    """The initial values of an adapter's matrix."""
    return initial_tensor(replace(row, init=adapter_init(row.name, row.shape)), seed)


def is_adapter(row: Parameter) -> bool:
    """Return True for a matrix of an adapter."""
    return not row.merge and row.name.rpartition(".")[2] in (DOWN, UP)
