"""The state table: every tensor that a checkpoint holds, and which rank holds which part.

State tensors are `model.<name>`, and what the optimizer keeps: `optimizer.exp_avg.<name>` and
`optimizer.exp_avg_sq.<name>` for AdamW (see `optimizer_state.py`). An optimizer's step
count is the step itself. Nothing else is state: data position and random numbers are functions of
the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any

from holdfast.core.sharding.boxes import Box
from holdfast.core.sharding.parameters import EXPERTS, decoder_parameters
from holdfast.core.sharding.reduction_tree import Shares, deal
from holdfast.core.sharding.sharding_table import chunk_range, component_part, sharding_table
from holdfast.layout import Coordinate, Replica, Topology

if TYPE_CHECKING:  # the mover has no use for pydantic
    from holdfast.config.sections.model import ModelConfig
    from holdfast.config.sections.optimizer import OptimizerConfig

ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "BF16": 2,
    "F16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
"""Bytes of one element, by safetensors' name of the dtype."""

STATE_DTYPE = {"fp32": "F32", "bf16": "F32", "fp16": "F32", "fp8": "F32", "float64": "F64"}
"""dtype of parameters and optimizer state by `train.precision`. Those in `MIXED` compute on
copies."""

MIXED = ("bf16", "fp16", "fp8")
"""The precisions that compute on copies in two bytes, of fp32 state. fp8 multiplies some of them
in float8."""

MODEL_PREFIX = "model."


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One row: a tensor, and which axes cut it.

    shard_dim: the dim that `dp_shard` cuts; None: each of its ranks holds all.
    tp_dim, tp_units: the dim that `tp` cuts and its indivisible units, as in `Sharding`.
    positions: the stages that hold these positions of the model hold the tensor; (): all do.
    ep: of experts: the ranks along dp_shard and cp that share them, at most (`layout.ep`).
    tp_degree: that of its component along tp; 0: it has none of its own.
    of_learners: dim 0 numbers the learners of `outer`. A replica holds those that it computes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard_dim: int | None = None
    tp_dim: int | None = None
    tp_units: int = 1
    positions: tuple[int, ...] = ()
    ep: int = 1
    tp_degree: int = 0
    of_learners: bool = False

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    def to_json(self) -> list[Any]:
        return [
            self.name,
            self.dtype,
            list(self.shape),
            self.shard_dim,
            self.tp_dim,
            self.tp_units,
            list(self.positions),
            *([self.ep] if self.ep > 1 or self.tp_degree or self.of_learners else []),
            *([self.tp_degree] if self.tp_degree or self.of_learners else []),
            *([True] if self.of_learners else []),
        ]

    @staticmethod
    def from_json(value: Sequence[Any]) -> TensorSpec:
        """Rows of format 1 end with `shard_dim`. `ep` is there only if it is above 1 or
        `tp_degree` follows, and `tp_degree` if it is not 0 or `of_learners` follows. Raises
        ValueError for what is no row."""
        if len(value) not in (4, 7, 8, 9, 10):
            raise ValueError(f"a row of the table has {len(value)} entries: {value}")
        name, dtype, shape, shard_dim = value[:4]
        if dtype not in ITEM_BYTES:
            raise ValueError(f"{name}: dtype {dtype!r} is unknown")
        tp_dim, tp_units, positions = value[4:7] or (None, 1, ())
        return TensorSpec(
            str(name),
            dtype,
            tuple(int(n) for n in shape),
            shard_dim,
            tp_dim,
            int(tp_units),
            tuple(int(p) for p in positions),
            int(value[7]) if len(value) > 7 else 1,
            int(value[8]) if len(value) > 8 else 0,
            bool(value[9]) if len(value) > 9 else False,
        )


StateTable = tuple[TensorSpec, ...]

LOSS_SCALE_ROW = TensorSpec("optimizer.loss_scale", "I64", (2,))
"""The state of fp16's loss scaling (`training/engine/loss_scale.py`); complete on every rank."""

ADAPTATION_ROW = TensorSpec("server.adaptation", "F64", (5,))
"""What the next step of a run with `server` is computed with
(`policy/server_updates.py`); complete on every rank."""


def state_table(
    model: ModelConfig, precision: str = "fp32", optimizer: OptimizerConfig | None = None
) -> StateTable:
    """All state tensors of a run of the decoder: parameters first, so that a restore can begin to
    compute early. optimizer: None: AdamW.

    dp_shard cuts dim 0 of every tensor, as FSDP2 does; tp and pp cut by `sharding_table`, the
    optimizer's moments as their parameter.
    """
    from holdfast.config.sections.optimizer import (
        OptimizerConfig,  # the mover has no use for pydantic
    )

    return with_optimizer_state(
        parameter_table(model, precision), optimizer or OptimizerConfig(), precision
    )


def with_optimizer_state(
    parameters: StateTable, optimizer: OptimizerConfig, precision: str
) -> StateTable:
    """The rows of the parameters under the names of the state, then the optimizer's rows, then the
    loss scale of fp16."""
    from holdfast.core.sharding.optimizer_state import optimizer_rows

    model = tuple(replace(row, name=MODEL_PREFIX + row.name) for row in parameters)
    scale = (LOSS_SCALE_ROW,) if precision == "fp16" else ()
    return tuple(chain(model, *optimizer_rows(optimizer, parameters), scale))


def lagged_policy_prefix(age: int) -> str:
    """Return the prefix of the policy that is `age` steps older than the state."""
    return f"policy.{age}."


def lagged_policy_rows(parameters: StateTable, lag: int) -> StateTable:
    """The rows of the older policies that a run with `rollout.lag` still generates with."""
    return tuple(
        replace(row, name=f"{lagged_policy_prefix(age)}{row.name}")
        for age in range(1, lag + 1)
        for row in parameters
    )


LEARNER_PREFIX = "learners."
ERROR_PREFIX = "outer_error."
"""Of what a codec has left out of a learner's changes so far."""
WEIGHTS_PREFIX = "outer_weights."
"""Of a learner's own weights, if they are not those of the run (`outer.keeps_weights`)."""
LATE_PREFIX = "outer_late."
"""Of a learner's change that came late, with its weight: it counts in the next round."""
LATE_ROW = "outer.late"
"""The weight of each learner's late change; complete on every rank."""
REFUSED_ROW = "outer.refused"
"""How many changes of each learner were left out; complete on every rank."""


def learner_rows(state: StateTable, learners: int) -> StateTable:
    """The rows of what each learner keeps. state: the rows of the optimizer of one."""
    return tuple(
        replace(
            row,
            name=LEARNER_PREFIX + row.name,
            shape=(learners, *row.shape),
            shard_dim=None,
            tp_dim=None,
            tp_units=1,
            of_learners=True,
        )
        for row in state
    )


NO_DEGREES: Mapping[str, int] = {}


def parameter_table(
    model: ModelConfig,
    precision: str = "fp32",
    ep: int = 1,
    degrees: Mapping[str, int] = NO_DEGREES,
) -> StateTable:
    """The rows of the parameters alone, under their own names ("norm.weight"). ep: `layout.ep`.
    degrees: those of components along tp, if they have their own."""
    dtype, sharding = STATE_DTYPE[precision], sharding_table(model)
    return tuple(
        TensorSpec(
            p.name,
            dtype,
            p.shape,
            0,
            row.tp_dim,
            row.tp_units,
            row.positions,
            ep if EXPERTS in p.name else 1,
            0 if row.tp_dim is None else _degree_of(p.name, degrees),
        )
        for p in decoder_parameters(model)
        for row in (sharding[p.name],)
    )


def _degree_of(name: str, degrees: Mapping[str, int]) -> int:
    """The degree of the component that a parameter belongs to; 0: it has none of its own."""
    return next((n for component, n in degrees.items() if f".{component}." in name), 0)


def stages_of(spec: TensorSpec, replica: Replica) -> tuple[int, ...]:
    """The indices on `pp` of the ranks of `replica` that hold the tensor, rising."""
    degree = replica.degree("pp")
    if degree == 1 or not spec.positions:
        return tuple(range(degree))
    return tuple(sorted({replica.holder_of(position) for position in spec.positions}))


def mesh_box(spec: TensorSpec, replica: Replica, coordinate: Coordinate) -> Box:
    """Return the box of one tensor that the rank at `coordinate` of `replica` holds. It is empty,
    with no rows, if the rank's stage does not hold the tensor or there are more ranks than rows.

    First pp decides whether the rank holds anything. Then tp takes its units. Last, dp_shard cuts
    the rest, because FSDP2 shards the tensors that it finds on a rank. cp cuts experts alone, if
    ep spreads them.
    """
    if coordinate.pp not in stages_of(spec, replica):
        # No element of a tensor: no rows. A scalar has no dim that could be empty, so it gets one.
        return Box(spec.name, (0,) * max(1, len(spec.shape)), (0, *spec.shape[1:]))
    return cut_box(spec, replica, coordinate.dp_shard, coordinate.cp, coordinate.tp)


def cut_box(spec: TensorSpec, replica: Replica, dp_shard: int, cp: int, tp: int) -> Box:
    """The box that every rank at these indices holds, on the stages that hold the tensor."""
    offsets, lengths = [0] * len(spec.shape), list(spec.shape)
    if spec.tp_dim is not None:
        unit = spec.shape[spec.tp_dim] // spec.tp_units
        first, units = component_part(spec.tp_units, spec.tp_degree, replica.degree("tp"), tp)
        offsets[spec.tp_dim], lengths[spec.tp_dim] = first * unit, units * unit
    if spec.shard_dim is not None:
        dim = spec.shard_dim
        for parts, index in _shard_cuts(spec, replica, dp_shard, cp):
            start, lengths[dim] = chunk_range(lengths[dim], parts, index)
            offsets[dim] += start
    return Box(spec.name, tuple(offsets), tuple(lengths))


def _shard_cuts(
    spec: TensorSpec, replica: Replica, dp_shard: int, cp: int
) -> Iterator[tuple[int, int]]:
    """(parts, index) of each cut of `shard_dim`, one after the other.

    Of experts that are spread, ep takes a part first. The ranks with the same part are neighbours
    along dp_shard and cp. Under dp_shard FSDP2 shards the part over all of them, cp included.
    Without it they have copies, as along cp of any other tensor.
    """
    degree, shards = replica.expert_degree(spec.ep), replica.degree("dp_shard")
    if degree == 1:
        yield shards, dp_shard
        return
    alike = replica.token_shares // degree
    part, index = divmod(dp_shard * replica.degree("cp") + cp, alike)
    yield degree, part
    if shards > 1:
        yield alike, index


def holders_along_cp(spec: TensorSpec, replica: Replica, cp: int) -> tuple[int, ...]:
    """The indices along cp of the ranks that hold the same box as the one at `cp`, if all of their
    other indices are equal."""
    degree, contexts = replica.expert_degree(spec.ep), replica.degree("cp")
    if degree == 1 or spec.shard_dim is None:
        return tuple(range(contexts))
    if replica.degree("dp_shard") > 1:
        return (cp,)
    alike = contexts // degree
    first = cp // alike * alike
    return tuple(range(first, first + alike))


def local_boxes(topology: Topology, table: StateTable, rank: int) -> tuple[Box, ...]:
    """Return the boxes in `rank`'s memory: one per row of the table, in order; some may be
    empty."""
    replica, coordinate = topology.replica_of(rank), topology.coordinate(rank)
    return tuple(
        learner_box(spec, topology, replica.index)
        if spec.of_learners
        else mesh_box(spec, replica, coordinate)
        for spec in table
    )


@cache
def learner_shares(learners: int, replicas: int) -> Shares:
    """Return the learners that each replica computes. They differ by one at most."""
    return deal(learners, replicas)


def learner_box(spec: TensorSpec, topology: Topology, replica: int) -> Box:
    """Return the part of a row `of_learners` that a replica holds. It is empty, with no rows, if
    there are more replicas than learners."""
    share = learner_shares(spec.shape[0], len(topology.replicas))[replica]
    first = share[0] if share else 0
    offsets = (first, *(0 for _ in spec.shape[1:]))
    return Box(spec.name, offsets, (len(share), *spec.shape[1:]))
