"""Linear layers whose backward leaves the gradient of the weight for later.

A zero-bubble schedule splits a stage's backward (Qi et al. 2023, arXiv 2401.10241, section 2). The
gradient of the input comes at once. That of the weights comes when the rank would otherwise wait.
Of a linear layer these are two products, so the second needs no second pass over the graph. It
needs the layer's input and the gradient of its output, which are kept until then.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class LateGradient:
    """What the gradient of one layer is computed from.

    input: [..., inputs]; slope: the gradient of the output [..., outputs]. bias: None, or the
    parameter of which the output has `bias_share`.
    """

    weight: Tensor
    bias: Tensor | None
    bias_share: float
    input: Tensor
    slope: Tensor

    def compute(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(parameter, its gradient), as autograd computes them."""
        slope = self.slope.reshape(-1, self.slope.shape[-1])
        yield self.weight, slope.t().mm(self.input.reshape(-1, self.input.shape[-1]))
        if self.bias is not None:
            summed = slope.sum(0)
            yield self.bias, summed if self.bias_share == 1.0 else summed * self.bias_share


class LateGradients:
    """Those of one backward pass after another, in the order in which the pass came to them."""

    def __init__(self) -> None:
        self._kept: list[LateGradient] = []

    def keep(self, late: LateGradient) -> None:
        """Called by the backward pass of a layer."""
        self._kept.append(late)

    def take(self) -> list[LateGradient]:
        """Return what the pass that has ended left."""
        kept, self._kept = self._kept, []
        return kept


class LateLinear(torch.autograd.Function):
    """As `F.linear`, but the gradients of weight and bias go to `late`."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        bias_share: float,
        late: LateGradients,
    ) -> Tensor:
        ctx.save_for_backward(input)
        # Not saved: if the block is run again, autograd returns copies, which are no parameters.
        ctx.weight, ctx.bias, ctx.bias_share, ctx.late = weight, bias, bias_share, late
        whole = bias is None or bias_share == 1.0
        return F.linear(input, weight, bias if whole or bias is None else bias * bias_share)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        (input,) = ctx.saved_tensors
        ctx.late.keep(LateGradient(ctx.weight, ctx.bias, ctx.bias_share, input, slope))
        return slope.matmul(ctx.weight) if ctx.needs_input_grad[0] else None, None, None, None, None
