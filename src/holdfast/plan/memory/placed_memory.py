"""The place in which the bytes of a rank's state lie, as `train.memory` says.

With the letters of `memory_use.py`, `optimizer` moves the moments. Under zero 1 it moves the
4 Psi/n of the fp32 copy of bf16 too. `parameters` moves the 4 Psi/n of zero 2 and 3. `gradients`
moves all buffers that sum gradients (`gradient_buffers.py`). An update brings pieces to the device.
They take min(3, pieces) times the largest piece, for each tensor that does not lie there.
`activations` moves what blocks keep, but for the block that ran last.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdfast.config.run import RunConfig
from holdfast.config.sections.memory import DEVICE, FILE, HOST, PLACES
from holdfast.core.sharding.optimizer_state import ParameterSettings, parameter_settings
from holdfast.core.sharding.reduction_tree import deal
from holdfast.core.sharding.run_table import run_parameters
from holdfast.core.sharding.state_table import ITEM_BYTES, STATE_DTYPE, StateTable, mesh_box
from holdfast.core.sharding.update_pieces import cut_into_pieces, staged_elements
from holdfast.layout import Coordinate, Replica, Topology
from holdfast.plan.memory.activations import RankShape, activations_of, device_kind, has_formula
from holdfast.plan.memory.gradient_buffers import gradient_buffers
from holdfast.plan.memory.memory_use import RankMemory, contents_by_rank, known_parameters
from holdfast.plan.step_microbatches import microbatches

_ALL_COMPUTED = 64  # ranks up to which each is computed by itself


@dataclass(frozen=True)
class PlacedMemory:
    """Bytes of one rank's state by place."""

    device: int
    host: int
    file: int
    staging: int  # of the device, that the pieces of an update take
    gradients: int  # all buffers that sum gradients, in their place


def placed_memory(
    config: RunConfig,
    table: StateTable,
    replica: Replica,
    at: Coordinate,
    held: RankMemory,
    gradients: int,
) -> PlacedMemory:
    """Return the bytes in each place. gradients: of all buffers that sum them."""
    memory = config.train.memory
    places: dict[str, int] = dict.fromkeys(PLACES, 0)
    staging = _staged_bytes(config, table, replica, at, held)
    places[DEVICE] += held.parameters - held.masters - held.shards
    places[memory.update] += staging
    on_device = staging if memory.update == DEVICE else 0
    places[memory.parameters] += held.shards
    places[memory.optimizer] += held.moments + held.masters
    places[memory.gradients] += gradients
    return PlacedMemory(**places, staging=on_device, gradients=gradients)


def placed_by_rank(config: RunConfig, topology: Topology) -> tuple[PlacedMemory, ...]:
    """All ranks, in order. Ranks at the same place of like replicas, with as many microbatches, are
    computed once if there are many."""
    shares = deal(max(microbatches(config).values()), len(topology.replicas))
    table, found = known_parameters(config), dict[object, PlacedMemory]()
    placed = []
    for each in contents_by_rank(config, topology):
        replica, rank = topology.replica_of(each.rank), each.rank
        key = replica.kind, each.at.mesh_rank, len(shares[each.at.replica])
        if key not in found or topology.world_size <= _ALL_COMPUTED:
            buffers = gradient_buffers(config, topology, rank, shares)
            sums = buffers.sums + buffers.arrivals
            placement = placed_memory(config, table, replica, each.at, each.held, sums)
            found[key] = _with_activations(placement, config, topology, each.at)
        placed.append(found[key])
    return tuple(placed)


def _with_activations(
    placed: PlacedMemory, config: RunConfig, topology: Topology, at: Coordinate
) -> PlacedMemory:
    """Add the activations that are not on the device: all but those of the block that ran last."""
    place = config.train.memory.activations
    if place == DEVICE or not has_formula(config):
        return placed
    replica = topology.replicas[at.replica]
    shape = RankShape.of(config, replica, at, device_kind(config))
    blocks = len(replica.blocks(at.pp) or range(config.model.layers))
    in_flight = activations_of(config, topology, at).in_flight
    policy = config.recompute_policy(at.pp, replica.degree("pp"), replica.degree("tp"))
    away = shape.moved(policy) * max(0, blocks * in_flight - 1)
    if at.pp > 0 and not (policy.word == "none" and shape.copies_input):
        away -= min(away, shape.stream() * in_flight)  # the first block's input stays
    return replace(placed, **{place: getattr(placed, place) + away})


def bytes_in_memory(config: RunConfig, held: RankMemory) -> int:
    """Return the bytes that do not lie in a file."""
    memory = config.train.memory
    in_file = {
        "optimizer": held.moments + held.masters,
        "gradients": held.gradients,
        "parameters": held.shards,
    }
    return held.total - sum(n for key, n in in_file.items() if getattr(memory, key) == FILE)


def _staged_bytes(
    config: RunConfig, table: StateTable, replica: Replica, at: Coordinate, held: RankMemory
) -> int:
    """Bytes of the pieces that an update uses through buffers."""
    memory, state = config.train.memory, ITEM_BYTES[STATE_DTYPE[config.train.precision]]
    parameters = memory.optimizer if held.masters else memory.parameters if held.shards else DEVICE
    places = (memory.optimizer, memory.optimizer, parameters, memory.gradients)
    if memory.update == HOST:
        far = {FILE} if device_kind(config) == "cpu" else {FILE, DEVICE}
    else:
        far = {HOST, FILE}
    tensors = sum(place in far for place in places)
    if not tensors or not memory.moves_state:
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
