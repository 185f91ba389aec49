"""What a script keeps: its module, its optimizers, and the options of each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from holdfast.errors import TaskError
from holdfast.tasks.named.kept_optimizers import KeptOptimizers, Options
from holdfast.tasks.task.module import tie_again, tied_names


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
