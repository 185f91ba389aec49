"""What a run trains, as data: its parameters, and how the axes cut each.

The built-in decoder's rows follow from `model`. Those of a task stand in the configuration, where
the launcher has put them (`tasks/describe.py` reads them off the module). Everything else asks
here, so that agent, mover and planner know no model.

A run of adapters (`lora`) trains their rows alone: the base's are none of the state.

A task's rows have no tensor or pipeline cut. Each is cut along dim 0 by dp_shard, as FSDP2 does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from holdfast.core.sharding.adapters import lora_parameters
from holdfast.core.sharding.parameters import Own, Parameter, decoder_parameters
from holdfast.core.sharding.pipeline_stages import BlockCosts, block_costs
from holdfast.core.sharding.reduction_cells import Cell, GradientRow, cells_of_rows, decoder_rows
from holdfast.core.sharding.state_table import (
    STATE_DTYPE,
    StateTable,
    TensorSpec,
    parameter_table,
    with_optimizer_state,
)
from holdfast.layout import Topology

if TYPE_CHECKING:  # the mover has no use for pydantic
    from holdfast.config.run import RunConfig

DECAYS, FROZEN = "decay", "frozen"
MERGES = ("mean", "sum")
"""Marks of a row in `task.parameters`. A row with one of the latter is a buffer's."""


def row_text(parameter: Parameter, *, is_frozen: bool) -> str:
    """A row of `task.parameters`: "name 64x10 decay"."""
    shape = "x".join(map(str, parameter.shape))
    marks = [DECAYS] * parameter.decay + [FROZEN] * is_frozen
    marks += [parameter.merge] if parameter.merge else []
    return " ".join([parameter.name, shape, *marks])


def row_of_text(text: str) -> Parameter:
    """The parameter that `row_text` wrote. Raises ValueError for another text."""
    name, shape, *marks = text.split(" ")
    sizes = tuple(int(n) for n in shape.split("x"))
    merge = next((mark for mark in marks if mark in MERGES), "")
    frozen = FROZEN in marks
    return Parameter(name, sizes, DECAYS in marks, Own(), merge=merge, frozen=frozen)


def run_parameters(config: RunConfig) -> tuple[Parameter, ...]:
    """The rows of all parameters, in the order of the module's."""
    if config.task.name:
        return tuple(row_of_text(text) for text in config.task.parameters)
    if config.lora.rank:
        return lora_parameters(config.model, config.lora)
    return decoder_parameters(config.model)


def run_parameter_table(config: RunConfig) -> StateTable:
    """The same, with dtypes and cuts."""
    precision = config.train.precision
    if config.without_table:
        return tuple(
            TensorSpec(p.name, STATE_DTYPE[precision], p.shape, 0) for p in run_parameters(config)
        )
    return parameter_table(config.model, precision)


def run_state_table(config: RunConfig) -> StateTable:
    """All state tensors: parameters first, then what the optimizer keeps."""
    train = config.train
    return with_optimizer_state(run_parameter_table(config), train.optimizer, train.precision)


def run_cells(config: RunConfig, topology: Topology, rank: int) -> tuple[Cell, ...]:
    """The reduction cells that `rank` is a member of."""
    layout = config.layout
    rows: Sequence[GradientRow] = (
        [
            GradientRow(spec, True, not row.merge)
            for spec, row in zip(run_parameter_table(config), run_parameters(config), strict=True)
        ]
        if config.without_table
        else decoder_rows(config.model, layout.sequence_parallel)
    )
    return cells_of_rows(topology, rows, rank, zero=layout.zero)


def run_block_costs(config: RunConfig) -> BlockCosts:
    """What a move of blocks between stages costs. A module without a sharding table is
    one block."""
    if config.without_table:
        return BlockCosts((0.0,), (sum(p.size for p in run_parameters(config)),))
    return block_costs(config.model, config.data.sequence_length)
