"""The `tp` axis of a user's module: its layers, each cut as a table says.

The styles have the names of `transformers`' plans:

    colwise                         Linear     rows of the weight; each rank has some outputs
    colwise_gather_output           Linear     the same; then each rank gets all outputs
    rowwise                         Linear     columns of the weight; the outputs are summed
    embedding_rowwise               Embedding  rows, so tokens; the embeddings are summed
    replicated_with_grad_allreduce  any        complete on each rank, which has its own inputs

What lies between a `colwise` layer and the `rowwise` one after it is a region. A rank computes its
own heads or inner units there (Shoeybi et al. 2019, section 3). Outside of regions each rank
computes the same from the same values, to the bit, so it has the complete gradient. A layer that is
used inside a region, without being cut, gets a part of the gradient on each rank.

Random numbers inside a region are the rank's own. Their seed is drawn where the region begins, and
afterwards the generators continue as on the other ranks. torch's generators hold all that is known
of it. So recomputation, which sets them back, draws the same numbers again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.core.seeds import key_seed
from holdfast.parallel.comm.collectives import Collectives, with_gradient

SHARED_INSIDE = "replicated_with_grad_allreduce"


class TensorRegions:
    """The way into and out of the regions of one module.

    has_own_numbers: False to draw the same random numbers inside as outside, on all ranks."""

    def __init__(self, collectives: Collectives) -> None:
        self.collectives, self.has_own_numbers = collectives, True
        self._seed_inside: int | None = None
        self._states_outside: Callable[[], None] = lambda: None

    def enter(self, x: Tensor) -> Tensor:
        """Begin a region, unless this is in one: x is complete, and so is its gradient."""
        if self.has_own_numbers and torch.initial_seed() != self._seed_inside:
            drawn = int(torch.randint(2**62, (), device="cpu"))
            self._states_outside = _kept_states(x.device)
            self._seed_inside = key_seed(drawn, "tp", self.collectives.rank)
            torch.manual_seed(self._seed_inside)
        return self.collectives.copy(x)

    def leave(self, x: Tensor) -> Tensor:
        """End it: the sum of all ranks' x."""
        if torch.initial_seed() == self._seed_inside:
            self._states_outside()
        return self.collectives.reduce(x)


def _kept_states(device: torch.device) -> Callable[[], None]:
    """Return what sets torch's generators back to where they are now."""
    state = torch.get_rng_state()
    if device.type == "cpu":
        return lambda: torch.set_rng_state(state)
    module = torch.get_device_module(device)
    of_device = module.get_rng_state(device)

    def restore() -> None:
        torch.set_rng_state(state)
        module.set_rng_state(of_device, device)

    return restore


class ColumnLinear(nn.Linear):
    """Some of the outputs."""

    regions: TensorRegions

    def forward(self, input: Tensor) -> Tensor:
        """input: [..., inputs], complete -> [..., outputs / n]"""
        return F.linear(self.regions.enter(input), self.weight, self.bias)


class GatheredColumnLinear(nn.Linear):
    """Some of the outputs, which all ranks then get from each other."""

    regions: TensorRegions

    def forward(self, input: Tensor) -> Tensor:
        """input: [..., inputs], complete -> [..., outputs]"""
        collectives = self.regions.collectives
        part = F.linear(collectives.copy(input), self.weight, self.bias)
        size = part.shape[-1]

        def gather(part: Tensor) -> Tensor:
            return collectives.all_gather(part.movedim(-1, 0)).movedim(0, -1).contiguous()

        def own_part(gradient: Tensor) -> Tensor:
            return gradient.narrow(-1, collectives.rank * size, size).contiguous()

        # All ranks compute the same with the result. So a part's gradient is that of its place.
        return with_gradient(part, gather, own_part)


class RowLinear(nn.Linear):
    """All outputs of some of the inputs, and their sum over ranks."""

    regions: TensorRegions

    def forward(self, input: Tensor) -> Tensor:
        """input: [..., inputs / n] -> [..., outputs], complete"""
        out = self.regions.leave(F.linear(input, self.weight))
        return out if self.bias is None else out + self.bias


class TokenEmbedding(nn.Embedding):
    """The embeddings of some tokens, and their sum over ranks."""

    regions: TensorRegions

    def forward(self, input: Tensor) -> Tensor:
        """input: [...] -> [..., D], complete"""
        collectives, rows = self.regions.collectives, self.weight.shape[0]
        first = collectives.rank * rows
        index = input - first
        here = (index >= 0) & (index < rows)
        padding = None if self.padding_idx is None else self.padding_idx - first
        if padding is not None and not 0 <= padding < rows:
            padding = None
        x = F.embedding(index.clamp(0, rows - 1), self.weight, padding)
        return collectives.reduce(x.masked_fill(~here[..., None], 0.0))


@dataclass(frozen=True)
class Style:
    """A way of cutting a layer.

    of: the layer's class. made: what it becomes. dims: the dim that is cut, by parameter; one that
    is not named stays complete.
    """

    of: type[nn.Module]
    made: type[nn.Module]
    dims: dict[str, int]


STYLES = {
    "colwise": Style(nn.Linear, ColumnLinear, {"weight": 0, "bias": 0}),
    "colwise_gather_output": Style(nn.Linear, GatheredColumnLinear, {"weight": 0, "bias": 0}),
    "rowwise": Style(nn.Linear, RowLinear, {"weight": 1}),
    "embedding_rowwise": Style(nn.Embedding, TokenEmbedding, {"weight": 0}),
}
"""Those that cut something. `SHARED_INSIDE` is one more."""


def cut_layers(module: nn.Module, styles: dict[str, str], regions: TensorRegions) -> None:
    """Cut the named layers of a module in place, on the meta device. Each dim that is cut must be
    divisible. A parameter of several layers stays one."""
    cut: dict[int, nn.Parameter] = {}
    size = regions.collectives.size
    for name, style in styles.items():
        if style == SHARED_INSIDE:
            continue
        layer, how = module.get_submodule(name), STYLES[style]
        for key, dim in how.dims.items():
            whole = layer._parameters[key]
            if whole is not None:
                if id(whole) not in cut:
                    cut[id(whole)] = _part(whole, dim, size)
                layer._parameters[key] = cut[id(whole)]
        layer.__class__ = how.made
        layer.regions = regions  # type: ignore[assignment]


def _part(whole: nn.Parameter, dim: int, size: int) -> nn.Parameter:
    shape = list(whole.shape)
    shape[dim] //= size
    made = torch.empty(shape, dtype=whole.dtype, device="meta")
    return nn.Parameter(made, requires_grad=whole.requires_grad)
