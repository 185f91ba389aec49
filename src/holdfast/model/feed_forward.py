"""Linear layers and the dense feed-forward of a block."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.model.late_gradients import LateGradients, LateLinear
from holdfast.model.nf4 import Nf4Linear, Nf4Weight

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}

Product = Callable[[Tensor, Tensor], Tensor]
"""(input [..., inputs], weight [outputs, inputs]) -> [..., outputs], as `F.linear`"""


class Linear(nn.Linear):
    """x W^T + b, by default without b, and without torch's own random start (see `init.py`).

    bias_share: the part of b that this module adds, where the outputs of several are summed.
    packed: the weight in 4 bits, where it is frozen; there is no `weight` then.
    late_gradients: takes what the gradients of W and b need, if the backward leaves them for later.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool = False):
        super().__init__(inputs, outputs, bias=bias)
        self.bias_share = 1.0
        self.packed: Nf4Weight | None = None
        self.late_gradients: LateGradients | None = None

    def forward(self, input: Tensor) -> Tensor:
        """input: [..., inputs] -> [..., outputs]"""
        if self.packed is not None:
            bias = None if self.bias is None else self.bias * self.bias_share
            return Nf4Linear.apply(input, self.packed, bias)  # type: ignore[no-any-return, no-untyped-call]
        late = self.late_gradients
        if late is not None and torch.is_grad_enabled() and self.weight.requires_grad:
            how = self.weight, self.bias, self.bias_share, late
            return LateLinear.apply(input, *how)  # type: ignore[no-any-return, no-untyped-call]
        whole = self.bias is None or self.bias_share == 1.0
        return F.linear(input, self.weight, self.bias if whole else self.bias * self.bias_share)

    def reset_parameters(self) -> None:
        """Leave the memory as it is."""


class GatedFeedForward(nn.Module):
    """down(activation(gate(x)) * up(x)): SwiGLU with silu, GeGLU with gelu"""

    def __init__(self, dim: int, inner: int, activation: str):
        super().__init__()
        self.gate = Linear(dim, inner)
        self.up = Linear(dim, inner)
        self.down = Linear(inner, dim)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, S, D] -> [B, S, D], through [B, S, F]"""
        return self.down(self.activation(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]
