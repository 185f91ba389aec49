"""What a script keeps: its module, and what its optimizer says of rates and weight decay.

The engine has an AdamW of its own, whose moments it can move, save and restore. So the script's
optimizer gives options and learning rates, and never takes a step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from holdfast.errors import TaskError
from holdfast.tasks.module import tie_again, tied_names

_SHARED_OPTIONS = ("lr", "betas", "eps")
_REMEMBERED_RATES = 64  # steps whose rates are kept: more than a repaired journal asks for


class KeptState:
    """A script's module and optimizer.

    values, buffers: what the module had when it was kept. clip_norm: largest global norm of the
    gradient; 0: no clipping.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        scheduler: LRScheduler | None,
        clip_norm: float,
    ) -> None:
        """Raises TaskError for what the engine cannot do."""
        self.module, self.clip_norm = module, clip_norm
        self._optimizer = optimizer
        self._ties = tied_names(module)
        self.values = {n: p.detach().cpu().clone() for n, p in module.named_parameters()}
        named = module.named_buffers(remove_duplicate=False)
        self.buffers = {name: buffer.detach().cpu().clone() for name, buffer in named}
        self._decaying = _decaying_names(module, optimizer)
        self._rates = _RateTable(optimizer, scheduler) if scheduler is not None else None
        self._used_rates: dict[int, float] = {}
        optimizer.register_step_pre_hook(_refuse_step)

    def on_meta(self) -> nn.Module:
        """Take the module's memory away, and return it: the engine gives it memory again."""
        apply: Any = self.module._apply
        apply(lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"))
        tie_again(self.module, self._ties)
        return self.module

    def decays(self, name: str) -> bool:
        return name in self._decaying

    @property
    def options(self) -> dict[str, Any]:
        """The keys of the run file that the optimizer decides."""
        first = self._optimizer.param_groups[0]
        decays = [float(group["weight_decay"]) for group in self._optimizer.param_groups]
        return {
            "train.optimizer.learning_rate": float(first.get("initial_lr", first["lr"])),
            "train.optimizer.betas": [float(beta) for beta in first["betas"]],
            "train.optimizer.eps": float(first["eps"]),
            "train.optimizer.weight_decay": max(decays),
            "train.schedule.kind": "constant",
            "train.schedule.warmup_steps": 0,
        }

    def begin_step(self, step: int) -> None:
        """Set the rate that the scheduler has for `step`."""
        if self._rates is not None:
            self._rates.set_rate(step)

    def use_rate(self, step: int) -> None:
        """Take the rate that the optimizer has now for `step`. Raises TaskError."""
        self._used_rates[step] = _common_option(self._optimizer, "lr")
        self._used_rates.pop(step - _REMEMBERED_RATES, None)

    def rate(self, step: int) -> float:
        """Return the rate that was used for `step`; for an unknown step the present one."""
        used = self._used_rates.get(step)
        return _common_option(self._optimizer, "lr") if used is None else used


class _RateTable:
    """The rate of each step, by a scheduler that is only ever moved forwards."""

    def __init__(self, optimizer: Optimizer, scheduler: LRScheduler) -> None:
        if isinstance(scheduler, ReduceLROnPlateau):
            raise TaskError(
                "ReduceLROnPlateau follows a metric, so that the rate is no function of the step",
                where="run.keep",
                remedy="use a scheduler that counts steps",
            )
        self._optimizer, self._scheduler = optimizer, scheduler
        self._begin = scheduler.last_epoch
        self._rates = [_common_option(optimizer, "lr")]
        vars(optimizer)["_opt_called"] = True  # torch warns of a scheduler without optimizer.step

    def set_rate(self, step: int) -> None:
        if self._scheduler.last_epoch != self._begin + len(self._rates) - 1:
            raise TaskError(
                "scheduler.step() was called for a scheduler that run.keep() was given",
                where="run.keep",
                remedy="remove the call: run.steps() sets the rate of each step",
            )
        while len(self._rates) < step:
            self._scheduler.step()
            self._rates.append(_common_option(self._optimizer, "lr"))
        for group in self._optimizer.param_groups:
            group["lr"] = self._rates[step - 1]


def _decaying_names(module: nn.Module, optimizer: Optimizer) -> frozenset[str]:
    """The names of the parameters that decay. Raises TaskError for another optimizer than AdamW, or
    for groups that differ in more than that."""
    groups = optimizer.param_groups
    if type(optimizer) is torch.optim.Adam and any(group["weight_decay"] for group in groups):
        raise _option_error("Adam with weight_decay adds it to the gradient", "use AdamW")
    if type(optimizer) not in (torch.optim.AdamW, torch.optim.Adam):
        kind = type(optimizer).__name__
        raise _option_error(f"the optimizer is {kind}", "use torch.optim.AdamW, or Adam")
    for option in ("amsgrad", "maximize"):
        if any(group.get(option) for group in groups):
            raise _option_error(f"the optimizer has {option}", f"use {option}=False")
    for option in _SHARED_OPTIONS:
        _common_option(optimizer, option)
    if len({float(group["weight_decay"]) for group in groups} - {0.0}) > 1:
        raise _option_error(
            "the optimizer's groups have several values of weight_decay", "use one value, and 0"
        )
    names = {id(p): name for name, p in module.named_parameters()}
    found: dict[str, bool] = {}
    for group in groups:
        for parameter in group["params"]:
            name = names.get(id(parameter))
            if name is None:
                shape = list(parameter.shape)
                raise _option_error(
                    f"the optimizer has a parameter of shape {shape} that is not the module's",
                    "keep one module with all trained parameters",
                )
            found[name] = group["weight_decay"] > 0
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and name not in found:
            raise _option_error(
                f"parameter {name} is not in the optimizer",
                "give it to the optimizer, or set requires_grad=False",
            )
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    return frozenset(name for name, decays in found.items() if decays and name in trained)


def _common_option(optimizer: Optimizer, option: str) -> Any:
    """The option that all groups share. Raises TaskError if they do not."""
    values = [group[option] for group in optimizer.param_groups]
    plain = [float(v) if isinstance(v, Tensor) else v for v in values]
    if any(value != plain[0] for value in plain):
        raise _option_error(
            f"the optimizer's groups have several values of {option}", "use one value in all groups"
        )
    return plain[0]


def _option_error(what: str, remedy: str) -> TaskError:
    return TaskError(what, where="run.keep", remedy=remedy)


def _refuse_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    raise TaskError(
        f"{type(optimizer).__name__}.step() was called for an optimizer that run.keep() was given",
        where="run.keep",
        remedy="call step.apply(): it votes and updates",
    )
