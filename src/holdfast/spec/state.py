"""The state table: every tensor that a checkpoint holds, and who holds which part of it.

State tensors are `model.<name>`, `optimizer.exp_avg.<name>` and `optimizer.exp_avg_sq.<name>`;
AdamW's step count is the step itself. Nothing else is state: data position and random numbers
are functions of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from holdfast.config.model import ModelConfig
from holdfast.layout import AXES, Coordinate, Replica, Topology
from holdfast.spec.boxes import Box
from holdfast.spec.parameters import decoder_parameters

ITEM_BYTES = {
    "F64": 8, "F32": 4, "BF16": 2, "F16": 2,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes of one element, by safetensors' name of the dtype."""

STATE_DTYPE = {"fp32": "F32", "bf16": "F32", "float64": "F64"}
"""dtype of parameters and optimizer state by `train.precision` (bf16 computes on fp32 state)."""

PREFIXES = ("model.", "optimizer.exp_avg.", "optimizer.exp_avg_sq.")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One row. `shard_dim` is the dim that `dp_shard` cuts; None: each of its ranks holds all."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard_dim: int | None = None

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    def to_json(self) -> list[Any]:
        return [self.name, self.dtype, list(self.shape), self.shard_dim]

    @staticmethod
    def from_json(value: Sequence[Any]) -> TensorSpec:
        name, dtype, shape, shard_dim = value
        if dtype not in ITEM_BYTES:
            raise ValueError(f"{name}: dtype {dtype!r} is unknown")
        return TensorSpec(str(name), dtype, tuple(int(n) for n in shape), shard_dim)


StateTable = tuple[TensorSpec, ...]


def state_table(model: ModelConfig, precision: str = "fp32") -> StateTable:
    """All state tensors of a run: parameters first, so that a restore can begin to compute early.

    Every tensor is cut along dim 0, as FSDP2 does.
    """
    dtype = STATE_DTYPE[precision]
    parameters = decoder_parameters(model)
    return tuple(
        TensorSpec(prefix + p.name, dtype, p.shape, 0) for prefix in PREFIXES for p in parameters
    )


def cuts(spec: TensorSpec) -> tuple[tuple[str, int], ...]:
    """(mesh axis, dim) for each axis that cuts this tensor, in mesh order.

    An axis that is not named here replicates. A later axis is one more pair in this table.
    """
    table = {"dp_shard": spec.shard_dim}
    return tuple((axis, dim) for axis in AXES if (dim := table.get(axis)) is not None)


def chunk(length: int, parts: int, index: int) -> tuple[int, int]:
    """(start, length) of part `index` of a dim, by `torch.chunk`'s rule, which FSDP2 follows:
    parts of ceil(length / parts), the last ones shorter or empty."""
    size = -(-length // parts)
    start = min(index * size, length)
    return start, min(start + size, length) - start


def mesh_box(spec: TensorSpec, replica: Replica, coordinate: Coordinate) -> Box:
    """What the rank at `coordinate` of `replica` holds of one tensor; may be empty."""
    offsets, lengths = [0] * len(spec.shape), list(spec.shape)
    for axis, dim in cuts(spec):
        degree = replica.mesh_shape[AXES.index(axis)]
        start, lengths[dim] = chunk(lengths[dim], degree, getattr(coordinate, axis))
        offsets[dim] += start
    return Box(spec.name, tuple(offsets), tuple(lengths))


def local_boxes(topology: Topology, table: StateTable, rank: int) -> tuple[Box, ...]:
    """What `rank` holds in memory: one box per row of the table, in order; some may be empty."""
    replica, coordinate = topology.replica_of(rank), topology.coordinate(rank)
    return tuple(mesh_box(spec, replica, coordinate) for spec in table)
