"""The values of a task's parameters and buffers before the first step, and its adapters (`lora`).

With adapters the task's linear layers get them, and all else of it is frozen. The frozen values are
those that the parameters would begin with. Each process makes them, and compares their checksum
with that of the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
import xxhash
from torch import Tensor, nn

from holdfast.config.sections.lora import LoraConfig
from holdfast.core.sharding.adapters import (
    DOWN,
    UP,
    adapter_init,
    is_target,
    refuse_unknown_targets,
)
from holdfast.core.sharding.parameters import Own, Parameter
from holdfast.errors import TaskError
from holdfast.model.init import initial_tensor
from holdfast.model.lora import add_adapters
from holdfast.tasks.task.loading import user_code
from holdfast.tasks.task.module import meta_module, own_values, table_shape, tied_names
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


FirstValue = Callable[[Parameter], Tensor]


def trained_module(task: Task, lora: LoraConfig) -> nn.Module:
    """The task's module on the meta device; with `lora.rank`, its parameters are adapters. Raises
    TaskError, and ConfigError for targets that mean no layer."""
    module = meta_module(task)
    if not lora.rank:
        return module
    layers = linear_layers(module)
    refuse_unknown_targets(lora.targets, {name: name for name in sorted(layers)}, "task")
    chosen = [
        name
        for name, _ in module.named_modules()
        if name in layers and any(is_target(target, (name,)) for target in lora.targets)
    ]
    places = Counter(id(part) for _, part in module.named_modules(remove_duplicate=False))
    for name in chosen:
        if places[id(module.get_submodule(name))] > 1:
            raise TaskError(
                f"layer {name} is used under several names, so it cannot have an adapter",
                remedy="leave it out of lora.targets",
            )
    add_adapters(module, chosen, lora)
    return module


def linear_layers(module: nn.Module) -> set[str]:
    """The names of the layers that may have an adapter."""
    return {name for name, part in module.named_modules() if type(part) is nn.Linear} - {""}


def frozen_values(task: Task, first_value: FirstValue) -> dict[str, Tensor]:
    """The values of the task's own parameters, by each of their names. Raises TaskError."""
    module = meta_module(task)
    found = {
        name: first_value(Parameter(name, tuple(parameter.shape), False, Own()))
        for name, parameter in module.named_parameters()
    }
    for first, *others in tied_names(module):
        found |= dict.fromkeys(others, found[first])
    return found


def values_checksum(values: Mapping[str, Tensor]) -> str:
    """xxh3-128 of names, shapes and float64 values."""
    total = xxhash.xxh3_128()
    for name in sorted(values):
        value = values[name].detach().to("cpu", torch.float64).contiguous()
        total.update(f"{name} {list(value.shape)}\0".encode())
        total.update(value.reshape(-1).numpy().data)
    return total.hexdigest()


def refuse_other_values(values: Mapping[str, Tensor], checksum: str) -> None:
    """Raises TaskError for values that are not those that the run was begun with."""
    found = values_checksum(values)
    if found != checksum:
        raise TaskError(
            f"the frozen parameters of the task are not those that the run was begun with: their "
            f"checksum is {found}, and it was {checksum}",
            remedy="let model() and initial() give the values that they gave then",
        )
