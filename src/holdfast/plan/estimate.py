"""An estimate of each rank's memory before the run: the most that it holds in a step.

Parameters and optimizer states are those of `memory_use.py`, gradients those of
`gradient_buffers.py`. Activations, logits and gathered parameters are by the formulas of
`activations.py` and `pass_memory.py`. The order of passes says how many microbatches are in flight
at each of them. What `train.memory` moves from the device is not counted. On a CPU the peak is
what an account of all tensors finds (`train/tensor_account.py`). The allocator of an accelerator
needs more, because free memory lies in pieces: `fragmentation` allows for that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from holdfast.config.memory import DEVICE
from holdfast.config.run import RunConfig
from holdfast.core.schedule.named import build_schedule
from holdfast.core.schedule.table import ActionKind, actions_of
from holdfast.core.sharding.reduction_tree import deal
from holdfast.core.sharding.sharding_table import tp_part
from holdfast.core.sharding.state_table import mesh_box
from holdfast.layout import Coordinate, Replica, Topology
from holdfast.plan.activations import RankActivations, RankShape, activations_of, device_kind
from holdfast.plan.gradient_buffers import gradient_buffers
from holdfast.plan.memory_use import known_parameters, memory_of
from holdfast.plan.pass_memory import Moment, Stage, backward_moments, forward_moments
from holdfast.plan.placed_memory import placed_memory
from holdfast.plan.step_microbatches import microbatches

FRAGMENTATION = 0.05
"""Part of what is not state that an accelerator's allocator may lose between pieces."""

_ALL_COMPUTED = 64
"""Ranks up to which each is computed for itself: like ones may have shares of unlike pieces."""

_PACKED_BELOW, _PACK_BYTES = 1 << 16, 1 << 25
"""Bytes of a parameter that ZeRO 1 gathers through a buffer, and of the buffer (`zero1.py`)."""


@dataclass(frozen=True)
class RankEstimate:
    """Bytes on one rank at the moment of a step at which it holds most. moment: which one.

    gradients: with partial sums, and those of a microbatch that wait for the next one's.
    gathered: parameters that FSDP2 has gathered. communication: buffers of messages.
    working: results of operations that are not kept. fragmentation: 0 on a CPU.
    """

    parameters: int
    gradients: int
    moments: int
    activations: int
    logits: int
    gathered: int
    communication: int
    working: int
    fragmentation: int
    moment: str

    @property
    def peak(self) -> int:
        state = self.parameters + self.gradients + self.moments
        passing = self.activations + self.logits + self.gathered + self.working
        return state + passing + self.communication + self.fragmentation


@dataclass(frozen=True)
class Pass:
    """A pass. in_flight: microbatches of which something is kept while it runs, its own included.
    waits: gradients of the microbatch before wait. stays: those of this one will."""

    is_forward: bool
    in_flight: int
    waits: bool
    stays: bool


def rank_estimate(
    config: RunConfig, topology: Topology, at: Coordinate, device: str = "cpu"
) -> RankEstimate:
    """Return the estimate of a run that `activations.has_formula`, at its largest batch.

    device: "cpu", or "accelerator".
    """
    parts = rank_parts(config, topology, at, device)
    number = parts.microbatches
    return parts.estimate(
        _passes(config, parts.stage, topology.replicas[at.replica], at.pp, number, parts.staying)
    )


@dataclass(frozen=True)
class RankParts:
    """What an estimate is made of, but for the order of passes.

    microbatches: that the rank computes. waiting: gradients of one that may wait for those of the
    next one. staying: places in its share of those whose gradients do. inputs: tokens and targets.
    staging: what an update brings to the device.
    """

    stage: Stage
    kept: RankActivations
    microbatches: int
    parameters: int
    sums: int
    moments: int
    messages: int
    inputs: int
    waiting: int
    staying: frozenset[int]
    staging: int
    device: str

    @property
    def state(self) -> int:
        """Bytes that no pass changes."""
        return self.parameters + self.sums + self.moments + self.inputs

    def estimate(self, sequence: Iterable[Pass]) -> RankEstimate:
        """The estimate of a rank that runs these passes."""
        worst, base, others = _worst(self.stage, self.kept, self.waiting, sequence)
        passing = worst.total + others + self.messages
        found = RankEstimate(
            self.parameters,
            self.sums + base,
            self.moments,
            self.inputs + others + worst.activations,
            worst.logits,
            worst.gathered,
            self.messages,
            worst.working,
            0 if self.device == "cpu" else int(FRAGMENTATION * passing),
            worst.name,
        )
        fits = self.staging <= passing + base
        return found if fits else _update(found, self.staging, base)


def rank_parts(config: RunConfig, topology: Topology, at: Coordinate, device: str) -> RankParts:
    """Return the parts of a rank's estimate."""
    replica, memory = topology.replicas[at.replica], config.train.memory
    shares = deal(max(microbatches(config).values()), len(topology.replicas))
    table = known_parameters(config)
    held = memory_of(config, table, replica, at)
    buffers = gradient_buffers(config, topology, replica.ranks[at.mesh_rank], shares)
    if memory.gradients != DEVICE:
        buffers = replace(buffers, sums=0, arrivals=0)
    kept = activations_of(config, topology, at, device)
    stage = stage_of(config, topology, at, device)
    number = len(shares[at.replica])
    parameters = held.parameters
    parameters -= held.masters if memory.optimizer != DEVICE else 0
    parameters -= held.shards if memory.parameters != DEVICE else 0
    if stage.gathers == 2:  # counted with what is gathered
        parameters -= stage.shape.item * (stage.blocks * stage.unit + stage.root)
    return RankParts(
        stage,
        kept,
        number,
        parameters,
        buffers.sums,
        held.moments if memory.optimizer == DEVICE else 0,
        buffers.arrivals + kept.waiting + _messages(config, replica, at, stage),
        16 * stage.shape.tokens * number,
        stage.shape.item * (stage.blocks * stage.unit + stage.root),
        buffers.staying,
        placed_memory(config, table, replica, at, held, 0).staging,
        device,
    )


def _update(found: RankEstimate, staging: int, waiting: int) -> RankEstimate:
    """The estimate of a rank that holds most while an update brings state to the device."""
    return replace(
        found,
        gradients=found.gradients - waiting,
        activations=0,
        logits=0,
        gathered=0,
        communication=0,
        working=staging,
        fragmentation=0,
        moment="update",
    )


def estimates_by_rank(config: RunConfig, topology: Topology) -> tuple[RankEstimate, ...]:
    """The estimate of each rank, in order. In a large world, ranks at the same place of like
    replicas, with as many microbatches, are computed once. The first rank along dp_shard
    stands for all of them there: none holds more."""
    shares = deal(max(microbatches(config).values()), len(topology.replicas))
    device, found = device_kind(config), dict[object, RankEstimate]()
    estimates = []
    for rank in range(topology.world_size):
        at = topology.coordinate(rank)
        replica = topology.replica_of(rank)
        key = replica.kind, at.pp, at.cp, at.tp, len(shares[at.replica])
        if key not in found or topology.world_size <= _ALL_COMPUTED:
            found[key] = rank_estimate(config, topology, at, device)
        estimates.append(found[key])
    return tuple(estimates)


def _worst(
    stage: Stage, kept: RankActivations, waiting: int, sequence: Iterable[Pass]
) -> tuple[Moment, int, int]:
    """(the moment, gradients that wait then, activations of other microbatches)"""
    forward = list(forward_moments(stage))
    backward = {stays: list(backward_moments(stage, stays=stays)) for stays in (False, True)}
    worst, base, others = Moment(""), 0, 0
    other = kept.per_microbatch + stage.incoming - stage.blocks * stage.moved
    for each in sequence:
        waits, before = waiting * each.waits, (each.in_flight - 1) * other
        if each.in_flight > 1 and not each.is_forward:
            before += stage.moved  # the last block of the newest
        for moment in forward if each.is_forward else backward[each.stays]:
            if moment.total + waits + before > worst.total + base + others:
                worst, base, others = moment, waits, before
    return worst, base, others


def _passes(
    config: RunConfig,
    stage: Stage,
    replica: Replica,
    index: int,
    number: int,
    staying: frozenset[int],
) -> Sequence[Pass]:
    """The passes of a step, each kind of them once. staying: places in the share, of microbatches
    whose gradients wait for those of the next one."""
    stages = replica.degree("pp")
    name = "gpipe" if number < stages else config.layout.schedule
    found: dict[Pass, None] = {}
    in_flight, waits = 0, False
    for is_forward, microbatch in _order(name, stages, index, number):
        in_flight += is_forward
        stays = microbatch in staying and not is_forward
        found[Pass(is_forward, in_flight, waits, stays)] = None
        if not is_forward:
            in_flight, waits = in_flight - 1, stays
    return list(found)


@lru_cache(maxsize=64)
def _order(name: str, stages: int, index: int, number: int) -> tuple[tuple[bool, int], ...]:
    """(is a forward pass, microbatch) of each action of a stage."""
    if stages == 1:
        return tuple((forward, n) for n in range(number) for forward in (True, False))
    row = build_schedule(name, stages, number).actions[index]
    actions = [action for cell in row if cell is not None for action in actions_of(cell)]
    return tuple((action.kind is ActionKind.FORWARD, action.microbatch) for action in actions)


def stage_of(config: RunConfig, topology: Topology, at: Coordinate, device: str) -> Stage:
    """Return what the formulas need of a rank's part of the model."""
    model, replica = config.model, topology.replicas[at.replica]
    shape, tp = RankShape.of(config, replica, at, device), replica.degree("tp")
    blocks = replica.blocks(at.pp) or range(model.layers)
    is_last, embeds = at.pp == replica.degree("pp") - 1, at.pp == 0
    first, held = tp_part(model.vocab_rows, tp, at.tp) if model.vocab_rows else (0, 0)
    stream = shape.item * shape.stream_tokens * model.dim
    policy = config.recompute_policy(at.pp, replica.degree("pp"), tp)
    unit = _elements(config, replica, at, f"layers.{blocks[0]}.")
    moves = config.train.memory.moves_activations
    is_copied = policy.word == "none" and shape.copies_input
    stays = not is_copied and policy.input_parts == 1
    zero = config.layout.zero_in_memory if replica.degree("dp_shard") > 1 else 1
    gathers = zero if zero > 1 else 0
    adds = max(microbatches(config).values()) > len(topology.replicas)
    adds |= config.train.memory.gradients != DEVICE  # a sum comes to the device first
    return Stage(
        shape,
        len(blocks),
        policy,
        max(1, model.vocab_size),
        max(0, min(held, model.vocab_size - first)) if is_last else 0,
        held if is_last or embeds else 0,
        embeds,
        model.tied_embeddings,
        tp > 1 and config.layout.sequence_parallel,
        stream * (not is_last) + shape.extra_of_first(policy, at.pp, tp),
        unit,
        _elements(config, replica, at) - len(blocks) * unit,
        gathers,
        replica.degree("dp_shard") if gathers and adds else 0,
        device,
        shape.moved(policy) if moves else 0,
        stream if moves and at.pp > 0 and stays else 0,
    )


def _elements(config: RunConfig, replica: Replica, at: Coordinate, prefix: str = "") -> int:
    """Elements of the rank's parameters, before dp_shard cuts them."""
    table = (replace(row, shard_dim=None) for row in known_parameters(config))
    return sum(mesh_box(row, replica, at).size for row in table if row.name.startswith(prefix))


def _messages(config: RunConfig, replica: Replica, at: Coordinate, stage: Stage) -> int:
    """Buffers of messages inside a replica. Between stages: the next input, and a gradient each
    way. Of ZeRO 1: what was gathered last, which stays until the next time."""
    before, after = at.pp > 0, at.pp < replica.degree("pp") - 1
    return stage.stream * (2 * before + after) + _last_pack(config, replica, at, stage.shape.item)


def _last_pack(config: RunConfig, replica: Replica, at: Coordinate, item: int) -> int:
    """Bytes of the buffer through which ZeRO 1 gathers the last of its small parameters."""
    shards = replica.degree("dp_shard")
    if shards == 1 or config.layout.zero_in_memory != 1:
        return 0
    packs, held = [0], 0
    for row in known_parameters(config):
        box = mesh_box(replace(row, shard_dim=None), replica, at)
        is_direct = box.lengths[0] % shards == 0 and item * box.size >= _PACKED_BELOW
        if not box.size or is_direct:
            continue
        if held >= _PACK_BYTES:
            packs.append(0)
            held = 0
        packs[-1] += item * shards * -(-box.lengths[0] // shards) * prod(box.lengths[1:])
        held += item * box.size
    return packs[-1]
