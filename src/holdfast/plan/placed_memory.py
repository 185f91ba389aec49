"""The place in which the bytes of a rank's state lie, as `train.memory` says.

With the letters of `memory_use.py`, `optimizer` moves the moments. Under zero 1 it moves the
4 Psi/n of the fp32 copy of bf16 too. `parameters` moves the 4 Psi/n of zero 2 and 3. `gradients`
moves the sums of gradients, and the sums of some microbatches. An update brings pieces to the
device. They take min(3, pieces) times the largest piece, for each tensor that does not lie there.
A sum of gradients ends at a multiple of 4,096 elements.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.config.memory import DEVICE, FILE, PLACES
from holdfast.config.run import RunConfig
from holdfast.core.sharding.optimizer_state import ParameterSettings, parameter_settings
from holdfast.core.sharding.reduction_tree import ReductionTree, Shares, deal, plan_accumulation
from holdfast.core.sharding.run_table import run_parameters
from holdfast.core.sharding.state_table import (
    ITEM_BYTES,
    MIXED,
    STATE_DTYPE,
    StateTable,
    mesh_box,
)
from holdfast.core.sharding.update_pieces import cut_into_pieces, staged_elements
from holdfast.layout import Coordinate, Replica, Topology
from holdfast.plan.layouts import microbatches
from holdfast.plan.memory_use import RankMemory, contents_by_rank, known_parameters


@dataclass(frozen=True)
class PlacedMemory:
    """Bytes of one rank's state by place. staging: those of the device that the pieces of an update
    take. partial_sums: sums of some microbatches, in the place of gradients."""

    device: int
    host: int
    file: int
    staging: int
    partial_sums: int


def placed_memory(
    config: RunConfig,
    table: StateTable,
    replica: Replica,
    at: Coordinate,
    held: RankMemory,
    dealings: list[Shares],
) -> PlacedMemory:
    """Return the bytes in each place. dealings: of each size of step, to all replicas."""
    memory = config.train.memory
    places: dict[str, int] = dict.fromkeys(PLACES, 0)
    partial = held.gradients * extra_sums(config, replica, dealings)
    staging = _staged_bytes(config, table, replica, at, held)
    places[DEVICE] += held.parameters - held.masters - held.shards + staging
    places[memory.parameters] += held.shards
    places[memory.optimizer] += held.moments + held.masters
    places[memory.gradients] += held.gradients + partial
    return PlacedMemory(**places, staging=staging, partial_sums=partial)


def placed_by_rank(config: RunConfig, topology: Topology) -> tuple[PlacedMemory, ...]:
    """All ranks, in order."""
    table, sizes = known_parameters(config), set(microbatches(config).values())
    dealings = [deal(number, len(topology.replicas)) for number in sizes]
    return tuple(
        placed_memory(config, table, topology.replica_of(each.rank), each.at, each.held, dealings)
        for each in contents_by_rank(config, topology)
    )


def bytes_in_memory(config: RunConfig, held: RankMemory) -> int:
    """Return the bytes that do not lie in a file."""
    memory = config.train.memory
    in_file = {
        "optimizer": held.moments + held.masters,
        "gradients": held.gradients,
        "parameters": held.shards,
    }
    return held.total - sum(n for key, n in in_file.items() if getattr(memory, key) == FILE)


def extra_sums(config: RunConfig, replica: Replica, dealings: list[Shares]) -> int:
    """Return how many sums of some microbatches a rank keeps next to the sum of all, at most."""
    if config.layout.reduction == "fast":
        return 0
    train, is_cut = config.train, replica.degree("dp_shard") > 1 and config.layout.zero > 1
    holds_leaf = not is_cut and train.precision not in MIXED and train.memory.gradients == DEVICE
    most = 0
    for shares in dealings:
        tree = ReductionTree(sum(map(len, shares)))
        actions = plan_accumulation(tree, shares[replica.index], holds_leaf)
        slots = {
            (action.piece, 0) if action.depth == 0 else (0, action.depth)
            for action in actions
            if not action.stays_in_place
        }
        most = max(most, len(slots | {(0, 0)}) - 1)
    return most


def _staged_bytes(
    config: RunConfig, table: StateTable, replica: Replica, at: Coordinate, held: RankMemory
) -> int:
    """Bytes of the pieces that an update brings to the device."""
    memory, state = config.train.memory, ITEM_BYTES[STATE_DTYPE[config.train.precision]]
    tensors = 0 if memory.optimizer == DEVICE else 2 + (held.masters > 0)
    tensors += memory.gradients != DEVICE
    tensors += memory.parameters != DEVICE and held.shards > 0
    if not tensors:
        return 0
    specs = {spec.name: spec for spec in table}
    groups: dict[ParameterSettings, list[tuple[int, int]]] = {}
    for index, row in enumerate(run_parameters(config)):
        size = mesh_box(specs[row.name], replica, at).size if row.name in specs else 0
        if size and not row.merge:
            settings = parameter_settings(config.train.optimizer, row)
            groups.setdefault(settings, []).append((index, size))
    pieces = cut_into_pieces(list(groups.values()), int(memory.piece_mb * 1e6) // state)
    return tensors * state * staged_elements(pieces)
