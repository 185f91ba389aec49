"""The state of a run on one rank: parameters and what the optimizer keeps, and nothing else.

Random numbers and the data position are functions of the step, and an optimizer's step count is the
step, so these tensors and one number are a whole checkpoint. Each has the same name under every
layout, and knows which box of its global shape this rank holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.config.sections.optimizer import BLOCKS
from holdfast.core.sharding.boxes import Box
from holdfast.core.sharding.optimizer_state import blocks_of, slot_prefix
from holdfast.core.sharding.parameters import Parameter
from holdfast.core.sharding.state_table import MODEL_PREFIX
from holdfast.training.memory.places import StateMemory
from holdfast.training.optimizers.optimizer import SlotTensors

ReadBox = Callable[[Box, Tensor], None]
"""Fills a contiguous CPU tensor with the elements of a box. One that also has a method `many`, of a
list of (box, tensor), is asked for all of them in one pass over the bytes."""

InitialBox = Callable[[Parameter, Box], Tensor]
"""(row, box) -> the box's values before the first step."""

HOST_COPY_BYTES = 2**30
"""Host memory at a time for tensors that cannot be filled in place."""


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
    """The parameters that one rank holds a part of, row by row of the parameter table.

    table: the rows whose block is on this rank's stage. boxes: what is held of each.
    master_tensors: what is trained and saved.
    initial_values: for a seed of the run, what gives each box its first values.
    compute_tensors: the bf16 copies that an unsharded model computes with, or nothing where the
        model computes on `master_tensors` itself, or where FSDP2 makes the copies.
    update_compute_tensors: called after `master_tensors` has changed, where others compute with
    what this rank updates
        (ZeRO-1); collective over a replica's shards.
    memory: gave the memory of the state; None: all is on the device.
    """

    table: tuple[Parameter, ...]
    boxes: tuple[Box, ...]
    master_tensors: list[Tensor]
    initial_values: Callable[[int], InitialBox]
    compute_tensors: list[Tensor]
    update_compute_tensors: Callable[[], None] = lambda: None
    memory: StateMemory | None = None

    def local_blocks(self, prefix: str, tensors: Sequence[Tensor | None]) -> list[LocalTensor]:
        """Name the scales of 8-bit state: one for each block of a row of the parameter's part."""
        return [
            LocalTensor(
                prefix + row.name,
                tensor,
                (box.offsets[0], blocks_of((1, box.offsets[1]))),
                (row.shape[0], blocks_of(row.shape)),
            )
            for row, box, tensor in zip(self.table, self.boxes, tensors, strict=True)
            if tensor is not None
        ]

    def local_tensors(self, prefix: str, tensors: Sequence[Tensor | None]) -> list[LocalTensor]:
        """Name tensors, one for each parameter. One with the shape of the parameter's part here is
        cut as the parameter is, another one is complete; None: there is none."""
        return [
            LocalTensor(prefix + row.name, tensor, box.offsets, row.shape)
            if tensor.shape == box.lengths
            else LocalTensor(prefix + row.name, tensor, (0,) * tensor.dim(), tuple(tensor.shape))
            for row, box, tensor in zip(self.table, self.boxes, tensors, strict=True)
            if tensor is not None
        ]

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Fill `master_tensors` with initial weights: a function of the seed and the names
        alone."""
        self.fill(self.initial_values(seed))

    @torch.no_grad()
    def fill(self, value: InitialBox) -> None:
        """Fill `master_tensors` with the values of each box."""
        for row, box, tensor in zip(self.table, self.boxes, self.master_tensors, strict=True):
            tensor.copy_(value(row, box))
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Bring what is computed with up to date; call after every change of `master_tensors`."""
        if self.compute_tensors:
            torch._foreach_copy_(self.compute_tensors, self.master_tensors)
        self.update_compute_tensors()


def state_tensors(parameters: Parameters, slots: Sequence[SlotTensors]) -> list[LocalTensor]:
    """All state of this rank, in the order of the state table: the parameters, then slot by
    slot."""
    found = parameters.local_tensors(MODEL_PREFIX, parameters.master_tensors)
    for each in slots:
        is_scale = each.slot.rule == BLOCKS
        named = parameters.local_blocks if is_scale else parameters.local_tensors
        found += named(slot_prefix(each.slot), each.tensors)
    return found


@torch.no_grad()
def clear(slots: Sequence[SlotTensors]) -> None:
    """Set the optimizer's state to zero."""
    for tensor in (tensor for each in slots for tensor in each.tensors):
        if tensor is not None:
            tensor.zero_()


@torch.no_grad()
def load_state(tensors: Sequence[LocalTensor], read: ReadBox) -> None:
    """Fill every tensor in place. What is not contiguous on the CPU goes through a copy there."""
    held = [local for local in tensors if local.tensor.numel()]
    in_place = [t for t in held if t.tensor.device.type == "cpu" and t.tensor.is_contiguous()]
    _fill(read, [(local.box, local.tensor) for local in in_place])
    group: list[LocalTensor] = []
    done = {id(local) for local in in_place}
    for local in (local for local in held if id(local) not in done):
        if group and sum(t.tensor.nbytes for t in group) + local.tensor.nbytes > HOST_COPY_BYTES:
            _load_through_host(read, group)
            group = []
        group.append(local)
    _load_through_host(read, group)


def _load_through_host(read: ReadBox, group: Sequence[LocalTensor]) -> None:
    hosts = [torch.empty(local.tensor.shape, dtype=local.tensor.dtype) for local in group]
    _fill(read, [(local.box, host) for local, host in zip(group, hosts, strict=True)])
    for local, host in zip(group, hosts, strict=True):
        local.tensor.copy_(host)


def _fill(read: ReadBox, wanted: Sequence[tuple[Box, Tensor]]) -> None:
    many = getattr(read, "many", None)
    if many is not None:
        many(wanted)
        return
    for box, tensor in wanted:
        read(box, tensor)
