"""Asks an optimizer's class what it keeps, by three updates of two small parameters.

A state of the parameter's shape is elementwise, and a number that counts the updates follows from
the step. The class declares all else in `state_shapes`, for example
`state_shapes = {"row_var": "rows", "scale": "scalar"}`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from holdfast.config.sections.optimizer import (
    ALL,
    BUILT_IN,
    COUNT,
    DECLARED,
    ELEMENTWISE,
    MATRICES,
    REPLICAS,
    STEP,
    VECTORS,
    OptimizerConfig,
    Slot,
)
from holdfast.core.sharding.optimizer_state import ParameterSettings, shape_of_rule
from holdfast.core.sharding.parameters import Own, Parameter
from holdfast.errors import ConfigError
from holdfast.tasks.named.named import one_sentence
from holdfast.tasks.task.ask import OPTIMIZER_KEY
from holdfast.training.optimizers.torch_optimizer import (
    MakeOptimizer,
    TorchOptimizer,
    groups_of_settings,
)

_STEPS, _RATE, _DECAY = 3, 0.01, 0.1
Shapes = Sequence[tuple[int, ...]]
_SHAPES: Shapes = ((6, 4), (5,))
_NEAR = 1e-6  # within which two updates of the same elements are equal, in float64


def probe_optimizer(
    make: MakeOptimizer, config: OptimizerConfig
) -> tuple[tuple[Slot, ...], tuple[str, ...]]:
    """Return the slots and the layouts, as the planned keys of the run file have them. Raises
    ConfigError for a class that a run cannot use."""
    slots = find_slots(make, config)
    return slots, _layouts(make, slots, _trained(make, config, list), config)


def find_slots(
    make: MakeOptimizer,
    config: OptimizerConfig,
    shapes: Shapes = _SHAPES,
    known: Mapping[str, str] | None = None,
) -> tuple[Slot, ...]:
    """What a class keeps. shapes: of parameters that it updates. known: the shapes of its state, if
    it does not declare them. Raises ConfigError for a class that a run cannot use."""
    parameters = _random(0, shapes)
    _check_options(make(_groups(parameters)), config)
    made = make(_groups(parameters))
    states: list[list[dict[str, Any]]] = []
    for step in range(1, _STEPS + 1):
        _update(made, parameters, _random(step, shapes), config)
        states.append([_copied(made.state[p]) for p in parameters])
    declared = dict(getattr(type(made), "state_shapes", known or {}))
    slots = _slots(states[-2], states[-1], declared, config, shapes)
    if not _same(parameters, _restored(make, slots, config, shapes)):
        raise _refusal(
            config,
            "keeps more than its state: after a restore, its third update is another one",
            "keep everything in self.state[parameter]",
        )
    return slots


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}


def _check_options(made: torch.optim.Optimizer, config: OptimizerConfig) -> None:
    if "lr" not in made.defaults:
        raise _refusal(config, "has no learning rate lr", "name a class whose groups have lr")
    decays = config.weight_decay or any(group.weight_decay for group in config.groups)
    if decays and "weight_decay" not in made.defaults:
        raise _refusal(config, "has no weight_decay", "use train.optimizer.weight_decay 0")


def _slots(
    second: Sequence[Mapping[str, Any]],
    third: Sequence[Mapping[str, Any]],
    declared: Mapping[str, str],
    config: OptimizerConfig,
    shapes: Shapes,
) -> tuple[Slot, ...]:
    """second, third: each parameter's state after these updates."""
    rules: dict[str, str] = {}
    owners: dict[str, list[int]] = {}
    for index, shape in enumerate(shapes):
        for name, value in third[index].items():
            if value is None:
                continue
            rule = _rule(name, value, second[index].get(name), shape, declared, config)
            if rules.setdefault(name, rule) != rule:
                raise _refusal(
                    config,
                    f"has state {name!r} of two kinds: {rules[name]} and {rule}",
                    "give it one shape",
                )
            owners.setdefault(name, []).append(index)

    def owner(of: Sequence[int]) -> str:
        if len(of) == len(shapes):
            return ALL
        return MATRICES if len(shapes[of[0]]) > 1 else VECTORS

    return tuple(Slot(name, rule, owner(owners[name])) for name, rule in rules.items())


def _rule(
    name: str,
    value: Any,
    before: Any,
    shape: tuple[int, ...],
    declared: Mapping[str, str],
    config: OptimizerConfig,
) -> str:
    is_tensor = isinstance(value, Tensor)
    found = tuple(value.shape) if is_tensor else ()
    if name in declared:
        rule = declared[name]
        if rule not in DECLARED:
            known = ", ".join(DECLARED)
            raise _refusal(config, f"declares {name!r} as {rule!r}", f"use one of {known}")
        if is_tensor and (found or (1,)) == shape_of_rule(rule, shape):
            return rule
        raise _refusal(
            config,
            f"declares state {name!r} as {rule}, and has {_describe(value)} for a parameter of "
            f"shape {list(shape)}",
            "declare what it is in state_shapes",
        )
    if is_tensor and found == shape and value.dtype == torch.float64:
        return ELEMENTWISE
    is_number = (is_tensor and value.numel() == 1) or isinstance(value, int | float)
    if is_number and float(value) == _STEPS and before is not None and float(before) == _STEPS - 1:
        return STEP if is_tensor else COUNT
    raise _refusal(
        config,
        f"has state {name!r}, {_describe(value)} for a parameter of shape {list(shape)}: it is not "
        "elementwise, and is not declared",
        _declaration(name, config),
    )


def _declaration(name: str, config: OptimizerConfig) -> str:
    """The remedy for state that is not declared."""
    _, _, own = config.name.rpartition(".")
    if config.name.startswith("torch.") and own.lower() in BUILT_IN:
        return f"use train.optimizer.name={own.lower()}"
    where = "a class derived from it" if config.name.startswith("torch.") else "the class"
    return (
        f"declare it in {where}: state_shapes = {{{name!r}: 'scalar'}} (docs/guide/optimizers.md)"
    )


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)} and {value.dtype}"
    return f"a {type(value).__name__}"


def _restored(
    make: MakeOptimizer, slots: Sequence[Slot], config: OptimizerConfig, shapes: Shapes
) -> list[Tensor]:
    """The parameters after as many updates, with a restore before the last one."""
    planned = config.model_copy(update={"slots": tuple(slot.text for slot in slots)})
    parameters = _random(0, shapes)
    rows = [Parameter(f"p{i}", tuple(p.shape), True, Own()) for i, p in enumerate(parameters)]
    every = range(len(rows))
    groups = groups_of_settings([ParameterSettings(_decay(config))] * len(rows), every)

    def driver() -> TorchOptimizer:
        return TorchOptimizer(make, parameters, rows, groups, every, slots, planned)

    first, second = driver(), driver()
    for step in range(1, _STEPS):
        first.apply(step, _RATE, _random(step, shapes))
    for ours, theirs in zip(second.slots, first.slots, strict=True):
        for to, found in zip(ours.tensors, theirs.tensors, strict=True):
            if to is not None and found is not None:
                to.copy_(found)
    second.apply(_STEPS, _RATE, _random(_STEPS, shapes))
    return parameters


def _layouts(
    make: MakeOptimizer, slots: Sequence[Slot], expected: Sequence[Tensor], config: OptimizerConfig
) -> tuple[str, ...]:
    """The axes under which each rank's update is the same as that of the complete parameters."""
    for index, whole in enumerate(expected):
        if not _same(_trained(make, config, itemgetter(slice(index, index + 1))), [whole]):
            return (REPLICAS,)
    if not _same(_trained(make, config, _parts), _parts(expected)):
        return (REPLICAS, "pp")
    if any(slot.rule not in (ELEMENTWISE, STEP, COUNT) for slot in slots):
        return (REPLICAS, "pp")
    return (REPLICAS, "pp", "dp_shard", "tp")


def _parts(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Each tensor cut in two by rows."""
    return [part for tensor in tensors for part in torch.split(tensor, 3)]


def _trained(
    make: MakeOptimizer, config: OptimizerConfig, choose: Callable[[list[Tensor]], list[Tensor]]
) -> list[Tensor]:
    """Some parameters, or parts of them, after as many updates."""
    parameters = [part.clone() for part in choose(_random(0))]
    made = make(_groups(parameters))
    for step in range(1, _STEPS + 1):
        _update(made, parameters, choose(_random(step)), config)
    return parameters


def _random(seed: int, shapes: Shapes = _SHAPES) -> list[Tensor]:
    """Parameters for seed 0, and gradients of a step."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def _groups(parameters: Sequence[Tensor]) -> list[dict[str, Any]]:
    return [{"params": list(parameters), "lr": _RATE, "weight_decay": 0.0}]


def _decay(config: OptimizerConfig) -> float:
    return _DECAY if config.weight_decay else 0.0


def _update(
    made: torch.optim.Optimizer,
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    config: OptimizerConfig,
) -> None:
    for group in made.param_groups:
        group["weight_decay"] = _decay(config)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    with torch.no_grad(), one_sentence(OPTIMIZER_KEY, f"step() of {config.name} failed"):
        made.step()
    for parameter in parameters:
        parameter.grad = None


def _same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(torch.allclose(a, b, rtol=_NEAR, atol=_NEAR) for a, b in pairs)


def _refusal(config: OptimizerConfig, what: str, remedy: str) -> ConfigError:
    return ConfigError(f"{config.name} {what}", where=OPTIMIZER_KEY, remedy=remedy)
