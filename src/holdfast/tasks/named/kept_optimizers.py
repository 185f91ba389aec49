"""What a script keeps: its module, its optimizers, and the options of each step.

The engine has a fused AdamW, which takes the place of a plain one. Each other class updates by
itself, on state that the engine moves, saves and restores
(`training/optimizers/torch_optimizer.py`). Its options are those of the script's groups at
`step.apply`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from xxhash import xxh3_64

from holdfast.config.sections.optimizer import (
    COLUMNS,
    OBJECT_PATH,
    REPLICAS,
    ROWS,
    OptimizerConfig,
    Slot,
)
from holdfast.core.sharding.parameters import Parameter
from holdfast.errors import ConfigError, TaskError
from holdfast.tasks.named.optimizer_probe import find_slots
from holdfast.tasks.task.module import tie_again, tied_names
from holdfast.training.optimizers.torch_optimizer import Groups, TorchOptimizer

Options = list[list[dict[str, Any]]]
"""For each optimizer, the options of its groups."""

_FUSED_OPTIONS = ("lr", "betas", "eps")
"""Options in which the groups of the engine's AdamW agree. They may have a decay, or none."""
_NO_FUSED_OPTIONS = ("amsgrad", "maximize")
_REFUSED_OPTIONS = ("fused", "capturable", "differentiable")
_SHAPES_OF_TORCH: Mapping[type[Optimizer], Mapping[str, str]] = {
    torch.optim.Adafactor: {"row_var": ROWS, "col_var": COLUMNS}
}
"""The state of torch's own classes that have no `state_shapes`."""
_COMPARED = (int, float, str, tuple)
_REMEMBERED_STEPS = 64  # whose options are kept: more than a repaired journal asks for
_MATRIX, _VECTOR = (6, 4), (5,)


_NamedGroup = tuple[int, dict[str, Any], dict[str, int]]
"""The number of an optimizer, one of its groups, and the dims of the parameters by name."""


@dataclass(frozen=True)
class _Group:
    """A group of one of the optimizers. names: of its parameters. slots: of their state."""

    optimizer: int
    names: tuple[str, ...]
    slots: tuple[Slot, ...]


class KeptOptimizers:
    """The optimizers of one module, each with parameters of its own."""

    def __init__(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Raises TaskError for what the engine cannot keep."""
        for optimizer in optimizers:
            if not isinstance(optimizer, Optimizer):
                raise _refusal(
                    f"run.keep() was given {type(optimizer).__name__} as an optimizer",
                    "give it a torch.optim.Optimizer, or a list of them",
                )
        self._optimizers = tuple(optimizers)
        named = _named_groups(module, optimizers)
        self._is_fused = _is_plain_adamw(optimizers)
        self._groups = () if self._is_fused else tuple(self._probed(named))
        trained = {name for name, p in module.named_parameters() if p.requires_grad}
        decaying = (names.keys() for _, group, names in named if group.get("weight_decay"))
        self._decaying = trained & set(chain.from_iterable(decaying))
        self._options_at_keep, self._used = self.options()[0], dict[int, Options]()
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(_refuse_step)
            vars(optimizer)["_opt_called"] = True  # torch warns of a scheduler without it

    def decays(self, name: str) -> bool:
        return name in self._decaying

    @property
    def planned_values(self) -> dict[str, Any]:
        """The keys of the run file that the optimizers decide."""
        first = self._optimizers[0].param_groups[0]
        groups = [group for one in self._optimizers for group in one.param_groups]
        found: dict[str, Any] = {
            "learning_rate": float(first.get("initial_lr", first["lr"])),
            "weight_decay": max(float(group.get("weight_decay", 0.0)) for group in groups),
        }
        if self._is_fused:
            found["betas"] = [float(beta) for beta in first["betas"]]
            found["eps"] = float(first["eps"])
        else:
            found["name"] = _path_of(self._optimizers[0])
            found["slots"] = [slot.text for slot in self._slots]
            found["layouts"] = [REPLICAS]
        return {f"train.optimizer.{key}": value for key, value in found.items()}

    # --- options and rates ------------------------------------------------------------------
    def options(self) -> Options:
        """Return the present options of all groups."""
        return [[_copied(group) for group in one.param_groups] for one in self._optimizers]

    def set_options(self, options: Options) -> None:
        for optimizer, groups in zip(self._optimizers, options, strict=True):
            for group, own in zip(optimizer.param_groups, groups, strict=True):
                group.update(own)

    def use_options(self, step: int) -> None:
        """Take the options that the optimizers have now for `step`. Raises TaskError."""
        if self._is_fused:
            optimizer = self._optimizers[0]
            # Raises TaskError if options of an AdamW are no longer those of the engine's.
            for group, own in zip(optimizer.param_groups, self._options_at_keep, strict=True):
                if _plain(group["lr"]) != _plain(optimizer.param_groups[0]["lr"]):
                    raise _refusal(
                        "the groups had one lr at run.keep(), and now have several",
                        "use one value in all groups, or several from the start",
                    )
                for option in ("betas", "eps", "weight_decay"):
                    if group[option] != own[option]:
                        raise _refusal(
                            f"{option} of {type(optimizer).__name__} has changed since run.keep()",
                            "keep it as it was: a scheduler may need cycle_momentum=False",
                        )
        self._used[step] = self.options()
        self._used.pop(step - _REMEMBERED_STEPS, None)

    def rate(self, step: int) -> float:
        """Return the rate of the first group in `step`; for an unknown step the present one."""
        return float(self._options_of(step)[0][0]["lr"])

    def digest(self, step: int) -> int:
        """Of the numbers and texts among the options of `step`: equal on ranks with equal ones."""
        known = [
            [(key, _plain(value)) for key, value in sorted(group.items())]
            for groups in self._options_of(step)
            for group in groups
        ]
        said = [[(k, v) for k, v in group if isinstance(v, _COMPARED)] for group in known]
        return xxh3_64(repr(said).encode()).intdigest() >> 1  # which an int64 holds

    def _options_of(self, step: int) -> Options:
        return self._used.get(step) or self.options()

    # --- for the engine ---------------------------------------------------------------------
    def parts(
        self, config: OptimizerConfig, rows: Sequence[Parameter], parameters: Sequence[Tensor]
    ) -> list[TorchOptimizer]:
        """What updates the parameters, one part for each optimizer; none: the engine's AdamW.

        Raises TaskError."""
        if self._is_fused:
            return []
        if config.state_slots != self._slots:
            raise TaskError(
                "the optimizer keeps other state than at the start of the run",
                where="run.keep",
                remedy="make it as it was made then",
            )
        places = {row.name: i for i, row in enumerate(rows) if not row.frozen}
        return [
            self._part(index, config, rows, parameters, places)
            for index in range(len(self._optimizers))
        ]

    def _part(
        self,
        index: int,
        config: OptimizerConfig,
        rows: Sequence[Parameter],
        parameters: Sequence[Tensor],
        places: Mapping[str, int],
    ) -> TorchOptimizer:
        own = [group for group in self._groups if group.optimizer == index]
        held = [[places[name] for name in group.names if name in places] for group in own]

        def groups(step: int, learning_rate: float) -> Groups:
            return list(zip(held, self._options_of(step)[index], strict=True))

        make = partial(_clone, self._optimizers[index], {})
        slots = tuple(dict.fromkeys(slot for group in own for slot in group.slots))
        indices = [i for one in held for i in one]
        return TorchOptimizer(make, parameters, rows, groups, indices, slots, config)

    @property
    def _slots(self) -> tuple[Slot, ...]:
        """In the order of the parts."""
        return tuple(dict.fromkeys(slot for group in self._groups for slot in group.slots))

    def _probed(self, named: Sequence[_NamedGroup]) -> Iterator[_Group]:
        """Ask each group's class what it keeps. If parameters differ in what they keep, each slot
        names its own. Raises TaskError."""
        found = [
            _Group(index, tuple(names), _slots_of(self._optimizers[index], group, names))
            for index, group, names in named
        ]
        if len(self._optimizers) == 1 and len({one.slots for one in found if one.names}) < 2:
            yield from found
            return
        for group in found:
            alike = [g for g in found if (g.optimizer, g.slots) == (group.optimizer, group.slots)]
            only = ",".join(name for one in alike for name in one.names)
            yield replace(group, slots=tuple(replace(slot, only=only) for slot in group.slots))


def _named_groups(module: nn.Module, optimizers: Sequence[Optimizer]) -> list[_NamedGroup]:
    """All groups. Raises TaskError for a parameter that is not the module's, and for one of the
    module's that is in no group."""
    names = {id(p): name for name, p in module.named_parameters()}
    found: list[_NamedGroup] = []
    for index, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in names:
                    raise _refusal(
                        f"the optimizer has a parameter of shape {list(parameter.shape)} that is "
                        "not the module's",
                        "keep one module with all trained parameters",
                    )
            found.append((index, group, {names[id(p)]: p.dim() for p in group["params"]}))
    known = Counter(name for _, _, group in found for name in group)
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and name not in known:
            raise _refusal(
                f"parameter {name} is not in the optimizer",
                "give it to the optimizer, or set requires_grad=False",
            )
        if known[name] > 1:
            raise _refusal(
                f"parameter {name} is in two optimizers", "give each parameter to one optimizer"
            )
    return found


def _is_plain_adamw(optimizers: Sequence[Optimizer]) -> bool:
    """Return True for an AdamW that the engine's own can replace, which has one rate and at most
    one decay."""
    first, *more = optimizers
    groups = first.param_groups
    decays = {float(group.get("weight_decay", 0.0)) for group in groups} - {0.0}
    if more or type(first) not in (torch.optim.AdamW, torch.optim.Adam) or len(decays) > 1:
        return False
    if type(first) is torch.optim.Adam and decays:
        return False
    if any(group.get(option) for group in groups for option in _NO_FUSED_OPTIONS):
        return False
    return all(_plain(g[o]) == _plain(groups[0][o]) for g in groups for o in _FUSED_OPTIONS)


def _slots_of(
    optimizer: Optimizer, group: Mapping[str, Any], names: Mapping[str, int]
) -> tuple[Slot, ...]:
    """What the class keeps for the parameters of a group. Raises TaskError if a run cannot."""
    if not names:
        return ()
    path = _path_of(optimizer)
    for option in _REFUSED_OPTIONS:
        if group.get(option):
            raise _refusal(f"the optimizer {path} has {option}", f"use {option}=False")
    dims = set(names.values())
    shapes = [_MATRIX] * any(d > 1 for d in dims) + [_VECTOR] * any(d < 2 for d in dims)
    options = {key: value for key, value in group.items() if key != "params"}
    config = OptimizerConfig(name=path, weight_decay=float(group.get("weight_decay", 0.0)))
    declared = _SHAPES_OF_TORCH.get(type(optimizer), {})
    try:
        return find_slots(partial(_clone, optimizer, options), config, shapes, declared)
    except ConfigError as error:
        remedy = error.remedy or "keep another class, such as torch.optim.AdamW"
        raise TaskError(error.message, where="run.keep", remedy=remedy) from error


def _clone(
    optimizer: Optimizer, options: Mapping[str, Any], groups: list[dict[str, Any]]
) -> Optimizer:
    """An optimizer of the same class and attributes, without state, for other groups."""
    made: Optimizer = object.__new__(type(optimizer))
    left_out = ("state", "param_groups", "step")  # schedulers wrap `step`
    copied = {key: value for key, value in vars(optimizer).items() if key not in left_out}
    hooks = {key: OrderedDict[int, Any]() for key in copied if key.endswith("_hooks")}
    vars(made).update(deepcopy({k: v for k, v in copied.items() if k not in hooks}) | hooks)
    made.state, made.param_groups = defaultdict(dict), []
    for group in groups:
        made.add_param_group(dict(options) | group)
    return made


def _path_of(optimizer: Optimizer) -> str:
    kind = type(optimizer)
    if kind.__module__.startswith("torch.optim."):
        return f"torch.optim.{kind.__name__}"
    path = f"{kind.__module__}:{kind.__name__}"
    return path if OBJECT_PATH.fullmatch(path) else f"script:{kind.__name__}"


def _copied(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group. A scheduler changes a rate that is a tensor in its place."""
    return {
        key: value.clone() if isinstance(value, Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, Tensor) else value


def _refusal(what: str, remedy: str) -> TaskError:
    return TaskError(what, where="run.keep", remedy=remedy)


def _refuse_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    raise TaskError(
        f"{type(optimizer).__name__}.step() was called for an optimizer that run.keep() was given",
        where="run.keep",
        remedy="call step.apply(): it votes and updates",
    )


class KeptState:
    """A script's module and optimizers.

    values, buffers: what the module had when it was kept. clip_norm: largest global norm of the
    gradient; 0: no clipping.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: KeptOptimizers,
        schedulers: Sequence[LRScheduler],
        clip_norm: float,
    ) -> None:
        """Raises TaskError for a scheduler that does not count steps."""
        self.module, self.optimizers, self.clip_norm = module, optimizers, clip_norm
        self._ties = tied_names(module)
        self.values = {n: p.detach().cpu().clone() for n, p in module.named_parameters()}
        named = module.named_buffers(remove_duplicate=False)
        self.buffers = {name: buffer.detach().cpu().clone() for name, buffer in named}
        self._schedule = _Schedule(optimizers, schedulers) if schedulers else None

    def on_meta(self) -> nn.Module:
        """Take the module's memory away, and return it: the engine gives it memory again."""
        apply: Any = self.module._apply
        apply(lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"))
        tie_again(self.module, self._ties)
        return self.module

    def begin_step(self, step: int) -> None:
        """Set the options that the schedulers have for `step`."""
        if self._schedule is not None:
            self._schedule.set_options(step)


class _Schedule:
    """The options of each step, by schedulers that are only ever moved forwards."""

    def __init__(self, optimizers: KeptOptimizers, schedulers: Sequence[LRScheduler]) -> None:
        if any(isinstance(scheduler, ReduceLROnPlateau) for scheduler in schedulers):
            raise TaskError(
                "ReduceLROnPlateau follows a metric, so that the rate is no function of the step",
                where="run.keep",
                remedy="use a scheduler that counts steps",
            )
        self._optimizers, self._schedulers = optimizers, schedulers
        self._begin = [scheduler.last_epoch for scheduler in schedulers]
        self._first = optimizers.options()
        self._rates = [_rates(self._first)]
        self._unlike: dict[int, Options] = {}  # of steps with other options than these rates

    def set_options(self, step: int) -> None:
        moved = len(self._rates) - 1
        if [scheduler.last_epoch - moved for scheduler in self._schedulers] != self._begin:
            raise TaskError(
                "scheduler.step() was called for a scheduler that run.keep() was given",
                where="run.keep",
                remedy="remove the call: run.steps() sets the rate of each step",
            )
        self._optimizers.set_options(self._of(len(self._rates)))  # some rates follow from the last
        while len(self._rates) < step:
            for scheduler in self._schedulers:
                scheduler.step()
            found = self._optimizers.options()
            self._rates.append(_rates(found))
            if found != self._of(len(self._rates)):
                self._unlike[len(self._rates)] = found
        self._optimizers.set_options(self._of(step))

    def _of(self, step: int) -> Options:
        """Of a step that the schedulers have been moved to."""
        if step in self._unlike:
            return self._unlike[step]
        rates = iter(self._rates[step - 1])
        return [[group | {"lr": next(rates)} for group in groups] for groups in self._first]


def _rates(options: Options) -> tuple[Any, ...]:
    return tuple(group["lr"] for groups in options for group in groups)
