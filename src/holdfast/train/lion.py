"""Lion, the one built-in optimizer that torch does not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


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
                momentum = state["exp_avg"]
                update = momentum.lerp(gradient, 1 - first).sign_()
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"])
                momentum.lerp_(gradient, 1 - second)
        return None
