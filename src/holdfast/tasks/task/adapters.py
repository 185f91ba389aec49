"""Adapters of a task's module (`lora`): its linear layers get them, and all else of it is frozen.

The frozen values are those that the parameters would begin with. Each process makes them, and
compares their checksum with that of the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import torch
import xxhash
from torch import Tensor, nn

from holdfast.config.sections.lora import LoraConfig
from holdfast.core.sharding.adapters import is_target, refuse_unknown_targets
from holdfast.core.sharding.parameters import Own, Parameter
from holdfast.errors import TaskError
from holdfast.model.lora import add_adapters
from holdfast.tasks.task.module import meta_module, tied_names
from holdfast.tasks.task.task import Task

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
    add_adapters(module, chosen, lora.rank, lora.scale, lora.dropout)
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
