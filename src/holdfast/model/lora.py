"""Adapters inside a module: y = W x + alpha / rank * B A dropout(x) (Hu et al. 2021, section 4.1).

The base's weights become buffers without memory, which the owner fills. So the module's parameters
are its adapters, and nothing else knows of the base: no gradient, optimizer or checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.config.sections.lora import LoraConfig
from holdfast.core.sharding.adapters import DOWN, UP
from holdfast.core.sharding.parameters import SCORE
from holdfast.model.feed_forward import Linear, Product
from holdfast.model.nf4 import Nf4Weight

NONE_CUT: Mapping[str, int] = {}


class LoraLinear(Linear):
    """A linear layer with an adapter. scale: of what the adapter adds. Dropout is active in passes
    that compute gradients. first_input: of those that this rank has, if tp cuts inputs. is_off:
    the base alone computes."""

    def __init__(
        self, base: nn.Linear, rank: int, scale: float, dropout: float, first_input: int = 0
    ):
        outputs, inputs = base.weight.shape  # of this rank; base.in_features: of all ranks
        super().__init__(inputs, outputs, base.bias is not None)
        self.is_off = False
        self.product: Product = F.linear
        self.bias_share = getattr(base, "bias_share", 1.0)
        self.scale, self.dropout = scale, dropout
        self.all_inputs, self.first_input = base.in_features, first_input
        self.lora_A = nn.Parameter(torch.empty(rank, inputs))
        self.lora_B = nn.Parameter(torch.empty(outputs, rank))

    def forward(self, input: Tensor) -> Tensor:
        """input: [..., inputs] -> [..., outputs]"""
        if self.is_off:
            return super().forward(input)
        x = input
        if self.dropout and torch.is_grad_enabled():
            # Each rank draws for all inputs, so a mask does not depend on tp.
            drawn = F.dropout(x.new_ones(*x.shape[:-1], self.all_inputs), self.dropout)
            x = x * drawn.narrow(-1, self.first_input, x.shape[-1])
        added = self.product(self.product(x, self.lora_A), self.lora_B)
        return super().forward(input) + added * self.scale


def add_adapters(
    module: nn.Module,
    layers: Collection[str],
    lora: LoraConfig,
    first_inputs: Mapping[str, int] = NONE_CUT,
) -> None:
    """Put an adapter into each of the named linear layers, and take the base out of the module's
    parameters. first_inputs: by layer, if tp has cut the module."""
    for name in layers:
        parent, _, key = name.rpartition(".")
        base = module.get_submodule(name)
        assert isinstance(base, nn.Linear)
        how = lora.rank, lora.scale, lora.dropout, first_inputs.get(name, 0)
        setattr(module.get_submodule(parent), key, LoraLinear(base, *how))
    for name, part in module.named_modules():
        if f"{name}.weight" == SCORE:  # it is trained
            continue
        for key, parameter in list(part._parameters.items()):
            if parameter is not None and key not in (DOWN, UP):
                del part._parameters[key]
                part.register_buffer(key, None, persistent=False)


@contextmanager
def adapters_off(module: nn.Module) -> Iterator[None]:
    """Compute with the base alone inside of it."""
    layers = [layer for layer in module.modules() if isinstance(layer, LoraLinear)]
    for layer in layers:
        layer.is_off = True
    try:
        yield
    finally:
        for layer in layers:
            layer.is_off = False


def set_base(module: nn.Module, values: Mapping[str, Tensor | Nf4Weight]) -> None:
    """Give the base's weights to a module with adapters, by the names that they had."""
    for name, value in values.items():
        parent, _, key = name.rpartition(".")
        layer = module.get_submodule(parent)
        if isinstance(value, Nf4Weight):
            assert isinstance(layer, Linear)
            layer.packed = value
        else:
            setattr(layer, key, value)


def merged(base: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """W + scale * B A, computed in at least float32.  [o, i], [r, i], [o, r] -> [o, i]"""
    wide = torch.promote_types(base.dtype, torch.float32)
    return base.to(wide) + (up.to(wide) @ down.to(wide)) * scale
