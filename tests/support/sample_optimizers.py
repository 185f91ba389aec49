"""Optimizers and schedules as users write them, right and wrong."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _OfUser(torch.optim.Optimizer):
    """A base: params, lr and weight_decay; `change` is one parameter's update."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def change(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                assert parameter.grad is not None
                change = self.change(parameter, parameter.grad, self.state[parameter])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(change, alpha=-group["lr"])


class Damped(_OfUser):
    """Elementwise, with a count as a number."""

    def change(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        state["updates"] = state.get("updates", 0) + 1
        if "mean" not in state:
            state["mean"] = gradient.clone()  # not zeros: the first update differs
        mean: Tensor = state["mean"].lerp_(gradient, 0.1)
        return mean / state["updates"] ** 0.5


class Scaled(_OfUser):
    """A declared scalar: the mean of the gradient's norm."""

    state_shapes = {"norm": "scalar"}  # noqa: RUF012

    def change(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        if "norm" not in state:
            state["norm"] = torch.zeros((), dtype=parameter.dtype)
        state["norm"].lerp_(gradient.norm(), 0.1)
        return gradient / (state["norm"] + 1e-8)


class Undeclared(Scaled):
    state_shapes: dict[str, str] = {}  # noqa: RUF012


class Misdeclared(Scaled):
    state_shapes = {"norm": "rows"}  # noqa: RUF012


class Secretive(_OfUser):
    """Keeps something outside its state."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr, weight_decay)
        self.calls = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        super().step()

    def change(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        return gradient / self.calls


class RowNormed(_OfUser):
    """No state, and an update that needs the complete matrix."""

    def change(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        return gradient / gradient.norm()


class NoOptimizer:
    pass


def rate(step: int, steps: int) -> float:
    """A fall in two stages."""
    return 1.0 if step <= steps // 2 else 0.25


def falls_below_zero(step: int, steps: int) -> float:
    return 1.0 - step / 2


def says_nothing(step: int, steps: int) -> None:
    return None


def fails_late(step: int, steps: int) -> float:
    if step > 3:
        raise ValueError("no rate for this step")
    return 1.0
