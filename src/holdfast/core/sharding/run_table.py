"""What a run trains, as data: its parameters, and how the axes cut each.

The built-in decoder's rows follow from `model`. Those of a task stand in the configuration, where
the launcher has put them (`tasks/child.py` reads them off the module). Everything else asks
here, so that agent, mover and planner know no model.

A run of adapters (`lora`) trains their rows alone: the base's are none of the state. tp and pp cut
those of the decoder as they cut its layers.

Of a task's rows, tp cuts those of its sharding table (`task.sharding`). pp gives them to stages by
their positions (`task.positions`). dp_shard cuts each along dim 0, as FSDP2 does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from math import prod
from typing import TYPE_CHECKING

from holdfast.core.sharding.adapters import adapter_shardings, lora_parameters
from holdfast.core.sharding.fragments import cut_cells
from holdfast.core.sharding.optimizer_state import optimizer_rows, velocity_rows
from holdfast.core.sharding.parameters import Own, Parameter, balanced_rows, decoder_parameters
from holdfast.core.sharding.pipeline_stages import BlockCosts, block_costs
from holdfast.core.sharding.reduction_cells import Cell, GradientRow, cells_of_rows, decoder_rows
from holdfast.core.sharding.sharding_table import Sharding, gradient_is_partial
from holdfast.core.sharding.state_table import (
    ADAPTATION_ROW,
    ERROR_PREFIX,
    LATE_PREFIX,
    LATE_ROW,
    REFUSED_ROW,
    STATE_DTYPE,
    WEIGHTS_PREFIX,
    StateTable,
    TensorSpec,
    lagged_policy_rows,
    learner_rows,
    parameter_table,
    with_optimizer_state,
)
from holdfast.layout import Topology

if TYPE_CHECKING:  # the mover has no use for pydantic
    from holdfast.config.run import RunConfig

DECAYS, FROZEN, PARTIAL = "decay", "frozen", "partial"
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


def sharding_text(name: str, sharding: Sharding) -> str:
    """A row of `task.sharding`: "name 0 4" or "name partial". In the first, tp cuts dim 0, which
    has 4 parts. In the second, each rank has all of it, and a part of its gradient."""
    if sharding.tp_dim is None:
        return f"{name} {PARTIAL}"
    return f"{name} {sharding.tp_dim} {sharding.tp_units}"


def sharding_of_text(text: str) -> tuple[str, Sharding]:
    """The name and the cut that `sharding_text` wrote. Raises ValueError for another text."""
    name, *cut = text.split(" ")
    if cut == [PARTIAL]:
        return name, Sharding(None, 1, (), per_token=False)
    dim, units = (int(number) for number in cut)
    return name, Sharding(dim, units, (), per_token=False)


def positions_text(name: str, positions: Sequence[int]) -> str:
    """A row of `task.positions`: "name 3", or "name -1 4" of what both ends use."""
    return " ".join([name, *map(str, positions)])


def positions_of_text(text: str) -> tuple[str, tuple[int, ...]]:
    """The name and the positions that `positions_text` wrote. Raises ValueError for another
    text."""
    name, *positions = text.split(" ")
    return name, tuple(int(position) for position in positions)


def _shardings(config: RunConfig) -> Iterator[Sharding]:
    """The cut of each row of adapters or a task. A row that the task's table does not name is
    complete, with its complete gradient, on each rank."""
    if config.has_decoder:
        yield from adapter_shardings(config.model, config.lora).values()
        return
    known = dict(map(sharding_of_text, config.task.sharding))
    places = dict(map(positions_of_text, config.task.positions))
    complete = Sharding(None, 1, (), per_token=True)
    for row in run_parameters(config):
        yield replace(known.get(row.name, complete), positions=places.get(row.name, ()))


def run_parameters(config: RunConfig) -> tuple[Parameter, ...]:
    """The rows of all parameters, in the order of the module's."""
    if config.task.name:
        return tuple(row_of_text(text) for text in config.task.parameters)
    if config.lora.rank:
        return lora_parameters(config.model, config.lora)
    tokens = config.train.microbatch_size * config.data.sequence_length
    top_k = config.model.experts.top_k if config.model.experts else 0
    return balanced_rows(decoder_parameters(config.model), config.model, tokens * top_k)


def run_parameter_table(config: RunConfig) -> StateTable:
    """The same, with dtypes and cuts."""
    precision = config.train.precision
    if config.trains_decoder:
        layout = config.layout
        return parameter_table(config.model, precision, layout.ep, layout.component_degrees)
    dtype = STATE_DTYPE[precision]
    return tuple(
        TensorSpec(p.name, dtype, p.shape, 0, cut.tp_dim, cut.tp_units, cut.positions)
        for p, cut in zip(run_parameters(config), _shardings(config), strict=True)
    )


def run_state_table(config: RunConfig) -> StateTable:
    """All state tensors: parameters first, then what the optimizer keeps, and the schedule."""
    train, parameters = config.train, run_parameter_table(config)
    rows = with_optimizer_state(parameters, config.step_train.optimizer, train.precision)
    if config.outer.is_on:
        kept = tuple(chain(*optimizer_rows(train.optimizer, parameters)))
        if config.outer.codec.keeps_error:
            kept += tuple(replace(row, name=ERROR_PREFIX + row.name) for row in parameters)
        if config.outer.keeps_weights:
            kept += tuple(replace(row, name=WEIGHTS_PREFIX + row.name) for row in parameters)
        if config.outer.keeps_late:
            kept += tuple(replace(row, name=LATE_PREFIX + row.name) for row in parameters)
        rows += learner_rows(kept, config.outer.learners)
        if config.outer.trust.is_on:
            rows += (TensorSpec(REFUSED_ROW, "I64", (config.outer.learners,)),)
        if config.outer.keeps_late:
            rows += (TensorSpec(LATE_ROW, "F64", (config.outer.learners,)),)
    if config.server.is_on:
        rows += (ADAPTATION_ROW,)
    if config.layout.keeps_velocity:
        rows += velocity_rows(parameters)
    return rows + lagged_policy_rows(parameters, config.rollout.lag if config.rollout.is_on else 0)


def run_cells(config: RunConfig, topology: Topology, rank: int) -> tuple[Cell, ...]:
    """The reduction cells that `rank` is a member of."""
    layout = config.layout
    rows: Sequence[GradientRow]
    if config.trains_decoder:
        sequence, degrees = layout.sequence_parallel, layout.component_degrees
        rows = decoder_rows(config.model, sequence, layout.ep, degrees)
    else:
        found = run_parameter_table(config), run_parameters(config), _shardings(config)
        rows = [
            GradientRow(spec, gradient_is_partial(cut, sequence_parallel=False), not row.merge)
            for spec, row, cut in zip(*found, strict=True)
        ]
    cells = cells_of_rows(topology, rows, rank, zero=layout.zero_in_memory)
    if (fragments := config.outer.fragments) > 1:
        return cut_cells(cells, run_parameters(config), fragments)
    return cells


def count_blocks(config: RunConfig) -> int:
    """The blocks that a pipeline shares out; 0: there are none."""
    return config.model.layers if config.has_decoder else config.task.blocks


def run_block_costs(config: RunConfig) -> BlockCosts:
    """What a move of blocks between stages costs. A task without blocks is one. The time of a
    task's block is taken as its number of parameters."""
    trained = run_parameter_table(config)
    count = count_blocks(config)
    if not count:
        return BlockCosts((0.0,), (sum(prod(row.shape) for row in trained),))
    if config.trains_decoder:
        found = block_costs(config.model, config.data.sequence_length)
        return replace(found, last=(found.last[0] * _head_passes(config), found.last[1]))
    sizes = dict.fromkeys(range(-1, count + 1), 0)
    for row in trained:
        sizes[row.positions[0]] += prod(row.shape)
    first, *blocks, last = sizes.values()
    times, end = tuple(map(float, blocks)), float(last)
    if config.has_decoder:
        costs = block_costs(config.model, config.data.sequence_length)
        times, end = costs.times, costs.last[0] * _head_passes(config)
    return BlockCosts(times, tuple(blocks), (0.0, first), (end, last))


def _head_passes(config: RunConfig) -> float:
    """The time of the vocabulary's head over that of training on the next token. An objective needs
    one more forward pass of it, which is a third. A reward model has no such head."""
    if not config.model.has_language_head:
        return 0.0
    return 1.0 if config.objective.is_next_token else 4 / 3
