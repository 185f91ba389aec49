"""Tensors of one model out of those of several, block by block."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from holdfast.core.sharding.parameters import EXPERTS, Parameter
from holdfast.model.huggingface_files import TensorReader
from holdfast.model.init import initial_box

_ROUTER = ".ffn.router."


class Mean:
    """The weighted mean of the same tensor of several models: summed in float64, in the order of
    the models, and rounded once."""

    def __init__(self, parts: Sequence[TensorReader], weights: Sequence[float]) -> None:
        self._parts = parts
        self._weights = [weight / sum(weights) for weight in weights]

    def dtype(self, name: str) -> torch.dtype:
        kinds = {part.dtype(name) for part in self._parts}
        return kinds.pop() if len(kinds) == 1 else torch.float32

    def box(self, name: str, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """The part of a tensor, as `TensorReader` has it."""
        values = [part.box(name, offsets, lengths) for part in self._parts]
        total = torch.zeros_like(values[0], dtype=torch.float64)
        for weight, value in zip(self._weights, values, strict=True):
            total.add_(value.to(torch.float64), alpha=weight)
        return total.to(self.dtype(name))


class Mixture:
    """Experts out of feed-forwards, a router with initial weights, and means."""

    def __init__(
        self, parts: Sequence[TensorReader], mean: Mean, rows: dict[str, Parameter], seed: int
    ) -> None:
        self._parts, self._mean, self._rows, self._seed = parts, mean, rows, seed

    def dtype(self, name: str) -> torch.dtype:
        if _ROUTER in name:
            name = name.replace("router", "gate")
        return self._mean.dtype(name.replace(EXPERTS, ".ffn."))

    def box(self, name: str, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """The part of a tensor, as `TensorReader` has it."""
        if _ROUTER in name:
            return initial_box(self._rows[name], self._seed, offsets, lengths)
        if EXPERTS not in name:
            return self._mean.box(name, offsets, lengths)
        own, kind = name.replace(EXPERTS, ".ffn."), self.dtype(name)
        chosen = self._parts[offsets[0] : offsets[0] + lengths[0]]
        return torch.stack([part.box(own, offsets[1:], lengths[1:]).to(kind) for part in chosen])


class Parts:
    """Each tensor out of the model that was chosen for it. of: by name of the tensor."""

    def __init__(self, of: Mapping[str, TensorReader]) -> None:
        self._of = of

    def dtype(self, name: str) -> torch.dtype:
        return self._of[name].dtype(name)

    def box(self, name: str, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """The part of a tensor, as `TensorReader` has it."""
        return self._of[name].box(name, offsets, lengths)


def count_unlike(one: TensorReader, other: TensorReader, rows: Iterable[Parameter]) -> int:
    """Return how many tensors of two models differ. rows: of the tensors that are compared."""

    def full(weights: TensorReader, row: Parameter) -> Tensor:
        return weights.box(row.name, (0,) * len(row.shape), row.shape)

    return sum(not torch.equal(full(one, row), full(other, row)) for row in rows)
