"""What updates the parameters that this rank holds: plain tensors, the state of which is tensors.

An optimizer's step count is the number of the step being applied, so nothing but its slots has to
be saved. An update is a function of the parameter, its gradient, its slots and the step alone.
Matrices decay, vectors do not, and groups of the run file decide otherwise by name. `AdamW` divides
and clips inside the fused kernel. Each other optimizer is a class of
`torch.optim` (`torch_optimizer.py`), and gets gradients that are divided already.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from holdfast.config.sections.optimizer import OptimizerConfig, Slot
from holdfast.core.sharding.optimizer_state import ParameterSettings
from holdfast.core.sharding.parameters import BALANCE
from holdfast.parallel.torch_compat import fused_adamw


@dataclass(frozen=True)
class SlotTensors:
    """A slot's tensor for each parameter of the rank; None if the parameter does not have it."""

    slot: Slot
    tensors: list[Tensor | None]


class Optimizer(Protocol):
    """Updates the parameters of one rank in place."""

    @property
    def slots(self) -> Sequence[SlotTensors]:
        """All of its state, in the order of the state table; the same storage every time."""
        ...

    def set_gradients(self, gradients: Sequence[Tensor]) -> None:
        """From now on the gradients lie there."""
        ...

    def apply(self, step: int, learning_rate: float, divisor: float, microbatches: int = 1) -> None:
        """Update `step`, which had so many microbatches, with gradients divided by `divisor`. The
        gradients are overwritten."""
        ...


def group_by_settings(
    indices: Sequence[int], settings: Sequence[ParameterSettings]
) -> list[tuple[ParameterSettings, list[int]]]:
    """Parameters with equal settings together, in the order of the first of each."""
    groups: dict[ParameterSettings, list[int]] = {}
    for index in indices:
        groups.setdefault(settings[index], []).append(index)
    return list(groups.items())


class AdamW:
    """Fused AdamW (Loshchilov and Hutter, 2019) with moments in the parameters' own dtype.

    gradients: one view per parameter of the summed, undivided gradient; overwritten by `apply`.
    merges: by index, how a buffer that is no parameter takes its sum (`Parameter.merge`).
    only: the parameters that it updates; None: all.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        settings: Sequence[ParameterSettings],
        config: OptimizerConfig,
        merges: Mapping[int, str] | None = None,
        only: Sequence[int] | None = None,
    ):
        self._config = config
        self._parameters, self._gradients = list(parameters), list(gradients)
        self._merges = dict(merges or {})
        owned = range(len(self._parameters)) if only is None else only
        self._moments = [
            {i: torch.zeros_like(self._parameters[i]) for i in owned} for _ in range(2)
        ]
        held = [i for i in owned if parameters[i].numel() and i not in self._merges]
        self._groups = group_by_settings(held, settings)

    @property
    def slots(self) -> list[SlotTensors]:
        places = range(len(self._parameters))
        return [
            SlotTensors(Slot(name), [moment.get(i) for i in places])
            for name, moment in zip(("exp_avg", "exp_avg_sq"), self._moments, strict=True)
        ]

    def set_gradients(self, gradients: Sequence[Tensor]) -> None:
        self._gradients = list(gradients)

    @torch.no_grad()
    def apply(self, step: int, learning_rate: float, divisor: float, microbatches: int = 1) -> None:
        merge_buffers(self._parameters, self._gradients, self._merges, microbatches)
        first, exp_avgs, exp_avg_sqs = self._parameters[0], *self._moments
        update = adamw_of_step(
            self._config, step, learning_rate, divisor, first.dtype, first.device
        )
        for settings, indices in self._groups:
            tensors = self._parameters, self._gradients, exp_avgs, exp_avg_sqs
            update(settings, *([held[i] for i in indices] for held in tensors))


def adamw_of_step(
    config: OptimizerConfig,
    step: int,
    learning_rate: float,
    divisor: float,
    dtype: torch.dtype,
    device: torch.device,
) -> Callable[..., None]:
    """Return the fused update of a step, of settings and tensors of `dtype`: parameters, gradients
    and both moments. In float64 the division is done beforehand: the kernel's own divisor is a
    float32."""
    count = torch.tensor(float(step), dtype=torch.float32, device=device)
    scale: Tensor | None = None
    if dtype != torch.float64:
        scale = torch.tensor(divisor, dtype=torch.float32, device=device)

    def update(
        settings: ParameterSettings,
        parameters: list[Tensor],
        gradients: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
    ) -> None:
        if scale is None:
            torch._foreach_div_(gradients, divisor)
        fused_adamw(
            parameters,
            gradients,
            exp_avgs,
            exp_avg_sqs,
            count,
            learning_rate=learning_rate * settings.rate_scale,
            betas=config.betas,
            eps=config.eps,
            weight_decay=settings.weight_decay,
            gradient_scale=scale,
        )

    return update


def merge_buffers(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    merges: Mapping[int, str],
    microbatches: int,
) -> None:
    """Add to each merged buffer its sum over the step, or the mean of its microbatches. One that
    balances experts moves by its rate, up where its sum is below its part."""
    for index, merge in merges.items():
        if merge.startswith(BALANCE):
            rate, due = map(float, merge.split()[1:])
            missing = due * microbatches - gradients[index].to(parameters[index].device)
            parameters[index].add_(missing.sign(), alpha=rate)
            continue
        part = 1.0 / microbatches if merge == "mean" else 1.0
        found = gradients[index].to(parameters[index].device)  # it may lie on the host
        parameters[index].add_(found, alpha=part)
