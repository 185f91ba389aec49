"""The state that every rank of a Topology holds, in words of the model and in bytes.

Bytes are counted while a step's backward runs, because a rank holds the most then: parameters,
gradients, AdamW's two moments. Another optimizer's state takes their place, and so do moments of
fewer bytes. Psi is the number of elements on a rank after tp and pp have cut, and n the degree of
dp_shard. The table is for the run file's precision (Rajbhandari et al. 2020, section 5). Our sizes
differ: bf16 computes on a copy of fp32 parameters, and sums gradients in fp32.

                    fp32                                bf16
    zero 1          4 Psi + 4 Psi + 8 Psi/n             (2 Psi + 4 Psi/n) + 4 Psi + 8 Psi/n
    zero 2          (4 Psi + 4 Psi/n) + (4 + 8) Psi/n   (2 Psi + 4 Psi/n) + (4 + 8) Psi/n
    zero 3          (4 + 4 + 8) Psi/n                   (4 + 4 + 8) Psi/n

With `rollout.lag`, each step of lag is one copy more of what is trained, counted with the moments.

With adapters (`lora`), Psi are theirs alone. The base is on each rank in full, in the dtype that is
computed with.

Not counted: activations, partial sums and messages on their way. Nor are the tensors of the current
block that zero 2 and 3 gather, or have not reduced yet.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain
from math import prod

from holdfast.config.run import RunConfig
from holdfast.config.sections.lora import NF4_BLOCK
from holdfast.core.sharding.adapters import packed_weights
from holdfast.core.sharding.optimizer_state import optimizer_rows
from holdfast.core.sharding.parameters import EXPERTS, count_parameters, decoder_parameters
from holdfast.core.sharding.run_table import run_parameter_table
from holdfast.core.sharding.sharding_table import component_part, tp_part
from holdfast.core.sharding.state_table import (
    ITEM_BYTES,
    MIXED,
    STATE_DTYPE,
    StateTable,
    TensorSpec,
    mesh_box,
    stages_of,
)
from holdfast.layout import Coordinate, Replica, Topology

Span = tuple[int, int]
"""(first, number)"""


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank."""

    parameters: int
    gradients: int
    moments: int
    masters: int = 0  # of the parameters that the model does not compute with
    shards: int = 0  # from which FSDP2 gathers

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.moments


@dataclass(frozen=True)
class RankContents:
    """One rank: where it sits, and its share of blocks, heads, vocabulary and bytes."""

    rank: int
    node: str
    at: Coordinate
    blocks: tuple[int, ...]
    embedding: bool
    head: bool
    heads: Span
    kv_heads: Span
    vocabulary: Span
    held: RankMemory


def known_parameters(config: RunConfig) -> StateTable:
    """The parameters' rows, without those of a vocabulary not known yet."""
    table = run_parameter_table(config)
    return tuple(spec for spec in table if all(n > 0 for n in spec.shape))


def contents_by_rank(config: RunConfig, topology: Topology) -> tuple[RankContents, ...]:
    """All ranks, in order. Ranks at the same place of like replicas are computed once."""
    table = known_parameters(config)
    bytes_at: dict[object, RankMemory] = {}
    found: list[RankContents] = []
    for rank, node in enumerate(topology.nodes):
        replica, at = topology.replica_of(rank), topology.coordinate(rank)
        key = (replica.kind, at.mesh_rank)
        if key not in bytes_at:
            bytes_at[key] = memory_of(config, table, replica, at)
        found.append(_contents_of(config, replica, at, rank, node, bytes_at[key]))
    return tuple(found)


def _contents_of(
    config: RunConfig, replica: Replica, at: Coordinate, rank: int, node: str, held: RankMemory
) -> RankContents:
    model, tp = config.model, replica.degree("tp")
    attention, _ = config.layout.tp_parts(tp)
    blocks = replica.blocks(at.pp) or tuple(range(model.layers))
    return RankContents(
        rank,
        node,
        at,
        blocks,
        embedding=replica.holder_of(-1) == at.pp,
        head=replica.holder_of(model.layers) == at.pp,
        heads=component_part(model.heads, attention, tp, at.tp),
        kv_heads=component_part(model.kv_heads, attention, tp, at.tp),
        vocabulary=tp_part(model.vocab_rows, tp, at.tp) if model.vocab_rows else (0, 0),
        held=held,
    )


def memory_of(config: RunConfig, table: StateTable, replica: Replica, at: Coordinate) -> RankMemory:
    """Bytes of the parameters in `table` on one rank, as the table of this module says."""
    state = ITEM_BYTES[STATE_DTYPE[config.train.precision]]
    mixed = config.train.precision in MIXED
    table = tuple(row for row in table if at.pp in stages_of(row, replica))  # the rest is empty
    uncut = [replace(spec, shard_dim=None) for spec in table]
    whole = _elements(uncut, replica, at)
    if (ep := replica.expert_degree(config.layout.ep)) > 1:
        experts = _elements((spec for spec in uncut if EXPERTS in spec.name), replica, at)
        whole -= experts - experts // ep
        if ep == replica.token_shares and replica.is_sharded and not mixed:
            whole -= experts // ep  # a rank computes with the experts that it holds
    cut = _elements(table, replica, at)
    kept = chain.from_iterable(optimizer_rows(config.train.optimizer, table))
    moments = sum(mesh_box(row, replica, at).size * ITEM_BYTES[row.dtype] for row in kept)
    zero = config.layout.zero_in_memory if replica.is_sharded else 1
    if zero == 3:
        parameters = state * cut
    elif mixed:
        parameters = 2 * whole + state * cut
    else:  # zero 1 updates its rows of the parameters in place; zero 2 gathers a second copy
        parameters = state * whole + (state * cut if zero == 2 else 0)
    parameters += frozen_bytes(config)
    if config.rollout.is_on:
        moments += config.rollout.lag * state * cut  # older policies lie with what is trained
    masters = state * cut if mixed and zero == 1 else 0
    shards = state * cut if zero > 1 else 0
    return RankMemory(parameters, state * (whole if zero == 1 else cut), moments, masters, shards)


def frozen_bytes(config: RunConfig) -> int:
    """Bytes of the base that a rank's adapters are for, or of a teacher of completions."""
    precision = config.train.precision
    item = 2 if precision in MIXED else ITEM_BYTES[STATE_DTYPE[precision]]
    if not config.lora.rank or config.task.name:
        return item * config.objective.reference.parameters
    packed = packed_weights(config.model, config.lora)
    rows = decoder_parameters(config.model)
    small = sum(prod(row.shape) for row in rows if row.name in packed)
    return item * (count_parameters(config.model) - small) + small // 2 + 4 * small // NF4_BLOCK


def _elements(table: Iterable[TensorSpec], replica: Replica, at: Coordinate) -> int:
    return sum(mesh_box(spec, replica, at).size for spec in table)
