"""Shapes of what the run's optimizer keeps for each parameter, and each parameter's settings.

The names of the state are `optimizer.SLOT.PARAMETER`. A slot of the parameter's own shape is cut as
the parameter is. Scales of 8-bit state are cut with the rows and blocks that they belong to. Each
other slot is complete on each rank that has the parameter. `config/sections/degrees.py` refuses
layouts in which a rank would have a part of it, or of a block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import prod
from typing import TYPE_CHECKING

from holdfast.config.sections.optimizer import (
    ALL,
    BLOCKS,
    COLUMNS,
    COUNT,
    ELEMENTWISE,
    HIDDEN,
    MATRICES,
    REST,
    ROWS,
    SCALAR,
    STEP,
    VECTORS,
    Slot,
)
from holdfast.options.short_state.keys import BLOCK

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.config.sections.optimizer import OptimizerConfig
    from holdfast.core.sharding.parameters import Parameter
    from holdfast.core.sharding.state_table import StateTable, TensorSpec

Shape = tuple[int, ...]

VELOCITY = Slot("velocity")
"""What a schedule may keep for each parameter, in addition to the optimizer's own slots."""


def is_hidden_matrix(optimizer: OptimizerConfig, name: str, shape: Shape) -> bool:
    """Return True for a parameter that Muon updates, False for one that takes AdamW."""
    patterns = optimizer.adamw_for
    return len(shape) == 2 and not any(fnmatchcase(name, pattern) for pattern in patterns)


def slot_shape(optimizer: OptimizerConfig, slot: Slot, name: str, shape: Shape) -> Shape | None:
    """Return the shape of a slot of a parameter; None if the parameter does not have it."""
    if slot.rule in (STEP, COUNT) or not slot.is_of(name):
        return None
    hidden = is_hidden_matrix(optimizer, name, shape)
    owners = {ALL, MATRICES if len(shape) >= 2 else VECTORS, HIDDEN if hidden else REST}
    if slot.rule == BLOCKS:
        return (shape[0], blocks_of(shape)) if optimizer.is_in_8bit(shape) else None
    return shape_of_rule(slot.rule, shape) if slot.of in owners else None


def shape_of_rule(rule: str, shape: Shape) -> Shape:
    """The shape that `rule` makes of a parameter's. A scalar has one element."""
    return {
        ELEMENTWISE: shape,
        ROWS: (*shape[:-1], 1),
        COLUMNS: (*shape[:-2], 1, shape[-1]) if len(shape) > 1 else shape,
        SCALAR: (1,),
    }[rule]


def blocks_of(shape: Shape) -> int:
    """Blocks of one row: of all elements with one index of dim 0. The last may be shorter."""
    return -(-prod(shape[1:]) // BLOCK)


def slot_dtype(optimizer: OptimizerConfig, slot: Slot, parameter: TensorSpec) -> str:
    """The dtype of a slot of a parameter, by safetensors' name."""
    if slot.rule != ELEMENTWISE:
        return parameter.dtype
    if optimizer.is_in_8bit(parameter.shape):
        return "U8"
    return "BF16" if optimizer.state_dtype == "bf16" else parameter.dtype


def optimizer_rows(optimizer: OptimizerConfig, parameters: StateTable) -> Iterator[StateTable]:
    """The rows of the state, slot by slot. parameters: their rows, under their own names."""
    for slot in optimizer.state_slots:
        rows = []
        for row in parameters:
            shape = slot_shape(optimizer, slot, row.name, row.shape)
            if shape is None:
                continue
            dtype = slot_dtype(optimizer, slot, row)
            named = replace(row, name=f"{slot_prefix(slot)}{row.name}", dtype=dtype, shape=shape)
            if slot.rule == BLOCKS:
                if row.tp_dim:
                    named = replace(named, tp_dim=1, tp_units=shape[1])
            elif slot.rule != ELEMENTWISE:
                named = replace(named, shard_dim=None, tp_dim=None, tp_units=1)
            rows.append(named)
        yield tuple(rows)


def velocity_rows(parameters: StateTable) -> StateTable:
    """The rows of what such a schedule keeps. parameters: their rows, under their own names."""
    prefix = slot_prefix(VELOCITY)
    return tuple(replace(row, name=f"{prefix}{row.name}") for row in parameters)


def bytes_like(optimizer: OptimizerConfig, parameter: TensorSpec) -> int:
    """Return the bytes of the optimizer's state that is cut as a parameter is."""
    found = 0
    for slot in optimizer.state_slots:
        shape = slot_shape(optimizer, slot, parameter.name, parameter.shape)
        if shape is not None and slot.rule in (ELEMENTWISE, BLOCKS):
            dtype = slot_dtype(optimizer, slot, parameter)
            found += replace(parameter, dtype=dtype, shape=shape).nbytes
    return found


def slot_prefix(slot: Slot) -> str:
    return f"optimizer.{slot.name}."


@dataclass(frozen=True, slots=True)
class ParameterSettings:
    """What an optimizer does with one parameter. rate_scale: times the step's learning rate."""

    weight_decay: float
    rate_scale: float = 1.0


def parameter_settings(optimizer: OptimizerConfig, row: Parameter) -> ParameterSettings:
    """The settings of the first group whose pattern matches; without one, of all."""
    own = optimizer.weight_decay if row.decay else 0.0
    for group in optimizer.groups:
        if fnmatchcase(row.name, group.match):
            given = group.weight_decay
            decay = own if given is None else 0.0 if row.frozen else given
            return ParameterSettings(decay, group.learning_rate_scale)
    return ParameterSettings(own)
