"""The state of a run on one rank: parameters and the optimizer's two moments, and nothing else.

Random numbers and the data position are functions of the step, and AdamW's step count is the
step, so these tensors and one number are a whole checkpoint. Each has the same name under every
layout, and knows which box of its global shape this rank holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.model.init import initial_box
from holdfast.spec.boxes import Box
from holdfast.spec.parameters import Parameter
from holdfast.spec.state import PREFIXES, chunk

Read = Callable[[Box, Tensor], None]
"""Fills a contiguous CPU tensor with the elements of a box."""


@dataclass(frozen=True)
class LocalTensor:
    """What this rank holds of one state tensor: the box (offsets, tensor.shape) of global_shape.

    The storage stays the same for the life of the engine; the contents change with each step.
    """

    name: str
    tensor: Tensor
    offsets: tuple[int, ...]
    global_shape: tuple[int, ...]

    @property
    def box(self) -> Box:
        return Box(self.name, self.offsets, tuple(self.tensor.shape))


@dataclass(frozen=True)
class Parameters:
    """The parameters of one rank, row by row of the parameter table.

    held: what is trained and saved (a shard of it, where the model is sharded).
    computed: the bf16 copies that a replicated model computes with, or nothing where the model
        computes on `held` itself, or where FSDP2 makes the copies.
    part, parts: this rank's place on the dp_shard axis.
    """

    table: tuple[Parameter, ...]
    held: list[Tensor]
    computed: list[Tensor]
    part: int = 0
    parts: int = 1

    def local(self, prefix: str, tensors: Sequence[Tensor]) -> list[LocalTensor]:
        """Name tensors that are cut as the parameters are."""
        return [
            LocalTensor(prefix + row.name, tensor, self._offsets(row), row.shape)
            for row, tensor in zip(self.table, tensors, strict=True)
        ]

    def _offsets(self, row: Parameter) -> tuple[int, ...]:
        """Dim 0 is cut as FSDP2 cuts it."""
        return (chunk(row.shape[0], self.parts, self.part)[0],) + (0,) * (len(row.shape) - 1)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Fill `held` with initial weights: a function of the seed and the names alone."""
        for row, tensor in zip(self.table, self.held, strict=True):
            tensor.copy_(initial_box(row, seed, self._offsets(row), tuple(tensor.shape)))
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Bring the computing copies up to date; call after every change of `held`."""
        if self.computed:
            torch._foreach_copy_(self.computed, self.held)


def state_tensors(
    parameters: Parameters, exp_avg: Sequence[Tensor], exp_avg_sq: Sequence[Tensor]
) -> list[LocalTensor]:
    """All state of this rank, in the order of the state table: model, exp_avg, exp_avg_sq."""
    lists = (parameters.held, exp_avg, exp_avg_sq)
    return [
        local
        for prefix, tensors in zip(PREFIXES, lists, strict=True)
        for local in parameters.local(prefix, tensors)
    ]


@torch.no_grad()
def load_state(tensors: Sequence[LocalTensor], read: Read) -> None:
    """Fill every tensor in place. What is not contiguous on the CPU goes through a copy there."""
    for local in tensors:
        tensor = local.tensor
        if tensor.numel() == 0:
            continue
        if tensor.device.type == "cpu" and tensor.is_contiguous():
            read(local.box, tensor)
        else:
            host = torch.empty(tensor.shape, dtype=tensor.dtype)
            read(local.box, host)
            tensor.copy_(host)
