"""Lion, the one built-in optimizer that torch does not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al., 2023, algorithm 2): the sign of an interpolation of momentum and gradient.

    params: parameter groups with lr and weight_decay. betas: of the update, and of the momentum.
    """

    def __init__(self, params: list[dict[str, Any]], betas: tuple[float, float]) -> None:
        super().__init__(params, {"lr": 1e-4, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update. closure: is not called."""
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                gradient, state = parameter.grad, self.state[parameter]
                if gradient is None:
                    continue
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                lion_update(
                    parameter,
                    gradient,
                    state["exp_avg"],
                    learning_rate=group["lr"],
                    betas=(first, second),
                    weight_decay=group["weight_decay"],
                )
        return None


def lion_update(
    parameter: Tensor,
    gradient: Tensor,
    momentum: Tensor,
    *,
    learning_rate: float,
    betas: tuple[float, float],
    weight_decay: float,
) -> None:
    """One update of a parameter and its momentum, in place."""
    update = momentum.lerp(gradient, 1 - betas[0]).sign_()
    parameter.mul_(1 - learning_rate * weight_decay)
    parameter.add_(update, alpha=-learning_rate)
    momentum.lerp_(gradient, 1 - betas[1])
