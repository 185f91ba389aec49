"""The values of a task's parameters and buffers before the first step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import Tensor

from holdfast.core.sharding.adapters import DOWN, UP, adapter_init
from holdfast.core.sharding.parameters import Parameter
from holdfast.errors import TaskError
from holdfast.model.init import initial_tensor
from holdfast.tasks.task.loading import user_code
from holdfast.tasks.task.module import meta_module, own_values, table_shape
from holdfast.tasks.task.task import Initial, Task


def first_values(task: Task, seed: int) -> Callable[[Parameter], Tensor]:
    """What `Task.weights` has, or `Task.initial` says, or what the module gave its parameters when
    it was made."""
    given: dict[str, Tensor] = {}
    asked: list[Mapping[str, Tensor]] = []

    def value(row: Parameter) -> Tensor:
        if not asked:
            asked.append(_trained_before(task))
        answer: Initial = asked[0].get(row.name)
        with user_code(f"initial() failed for {row.name}"):
            if answer is None and not row.merge:
                answer = task.initial(row.name, row.shape)
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
                remedy="return a tensor of the parameter's shape",
            )
        return answer

    return value


def _trained_before(task: Task) -> dict[str, Tensor]:
    """The values of a model that was trained before, in the table's shapes. Raises TaskError."""
    with user_code("weights() failed"):
        found = dict(task.weights())
    if not found:
        return found
    module = meta_module(task)
    known = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    if unknown := sorted(set(found) - known):
        raise TaskError(
            f"weights() has {unknown[0]}, which is no parameter of the module",
            remedy="give the names of model().named_parameters()",
        )
    return {name: value.detach().view(table_shape(value)) for name, value in found.items()}


def first_adapter(row: Parameter, seed: int) -> Tensor:
    """The initial values of an adapter's matrix."""
    return initial_tensor(replace(row, init=adapter_init(row.name, row.shape)), seed)


def is_adapter(row: Parameter) -> bool:
    """Return True for a matrix of an adapter."""
    return not row.merge and row.name.rpartition(".")[2] in (DOWN, UP)
