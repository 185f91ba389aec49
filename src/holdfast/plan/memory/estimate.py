"""An estimate of each rank's memory before the run: the most that it holds in a step.

Parameters and optimizer states are those of `memory_use.py`, gradients those of
`gradient_buffers.py`. Activations, logits and gathered parameters are by the formulas of
`activations.py` and `pass_memory.py`. The order of passes says how many microbatches are in flight
at each of them. What `train.memory` moves from the device is not counted. On a CPU the peak is what
an account of all tensors finds (`training/memory/tensor_account.py`). The allocator of an
accelerator needs more, because free memory lies in pieces: `fragmentation` allows for that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod

from holdfast.config.run import RunConfig
from holdfast.config.sections.memory import DEVICE
from holdfast.core.schedule.table import ActionKind
from holdfast.core.sharding.reduction_tree import deal
from holdfast.core.sharding.sharding_table import tp_part
from holdfast.core.sharding.state_table import mesh_box
from holdfast.layout import Coordinate, Replica, Topology
from holdfast.plan.memory.activations import (
    RankShape,
    activations_of,
    blocks_of,
    device_kind,
    is_last_stage,
    stage_bytes,
    stages_on,
)
from holdfast.plan.memory.gradient_buffers import gradient_buffers
from holdfast.plan.memory.memory_use import known_parameters, memory_of
from holdfast.plan.memory.pass_memory import FRAGMENTATION, Moment, Stage, loss_chunk, moments_of
from holdfast.plan.memory.pass_order import RankPass, rank_actions, rank_passes
from holdfast.plan.memory.placed_memory import placed_memory
from holdfast.plan.step_microbatches import microbatches

_ALL_COMPUTED = 64
"""Ranks up to which each is computed for itself: like ones may have shares of unlike pieces."""

_PACKED_BELOW, _PACK_BYTES = 1 << 16, 1 << 25
"""Bytes of a parameter that ZeRO 1 gathers through a buffer, and of the buffer (`zero1.py`)."""


@dataclass(frozen=True)
class RankEstimate:
    """Bytes on one rank at the moment of a step at which it holds most."""

    parameters: int
    gradients: int  # with partial sums, and those of a microbatch that wait for the next one's
    moments: int
    activations: int
    logits: int
    gathered: int  # parameters that FSDP2 has gathered
    communication: int  # buffers of messages
    working: int  # results of operations that are not kept
    fragmentation: int  # 0 on a CPU
    moment: str

    @property
    def peak(self) -> int:
        state = self.parameters + self.gradients + self.moments
        passing = self.activations + self.logits + self.gathered + self.working
        return state + passing + self.communication + self.fragmentation


def rank_estimate(
    config: RunConfig, topology: Topology, at: Coordinate, device: str = "cpu"
) -> RankEstimate:
    """Return the estimate of a run that `activations.has_formula`, at its largest batch. device:
    "cpu", or "accelerator"."""
    replica, memory = topology.replicas[at.replica], config.train.memory
    shares = deal(max(microbatches(config).values()), len(topology.replicas))
    table = known_parameters(config)
    held = memory_of(config, table, replica, at)
    buffers = gradient_buffers(config, topology, replica.ranks[at.mesh_rank], shares)
    if memory.gradients != DEVICE:
        buffers = replace(buffers, sums=0, arrivals=0)
    kept = activations_of(config, topology, at, device)
    stages = stages_of(config, topology, at, device)
    stage = next(iter(stages.values()))
    share = len(shares[at.replica])
    passes = _passes(config, replica, at, stages, share, buffers.staying)
    worst, base, others = _worst(stages, passes)
    messages = buffers.arrivals + kept.waiting
    messages += sum(_messages(replica, at, number, each) for number, each in stages.items())
    messages += _last_pack(config, replica, at, stage.shape.item)
    inputs = 16 * stage.shape.tokens * share  # tokens and targets
    parameters = held.parameters
    parameters -= held.masters if memory.optimizer != DEVICE else 0
    parameters -= held.shards if memory.parameters != DEVICE else 0
    if stage.gathers == 2:  # counted with what is gathered
        parameters -= stage.shape.item * (stage.blocks * stage.unit + stage.root)
    passing = worst.total + others + messages
    found = RankEstimate(
        parameters,
        buffers.sums + base,
        held.moments if memory.optimizer == DEVICE else 0,
        inputs + others + worst.activations,
        worst.logits,
        worst.gathered,
        messages,
        worst.working,
        0 if device == "cpu" else int(FRAGMENTATION * passing),
        worst.name,
    )
    staging = placed_memory(config, table, replica, at, held, 0).staging
    if staging <= passing + base:
        return found
    # it holds most while an update brings state to the device
    state = parameters, buffers.sums, found.moments
    return RankEstimate(*state, 0, 0, 0, 0, staging, 0, "update")


def estimates_by_rank(config: RunConfig, topology: Topology) -> tuple[RankEstimate, ...]:
    """The estimate of each rank, in order. In a large world, ranks at the same place of like
    replicas, with as many microbatches, are computed once. The first shard
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


def _worst(stages: Mapping[int, Stage], passes: Iterable[RankPass]) -> tuple[Moment, int, int]:
    """(the moment, gradients that wait then, activations of other passes)"""
    moments = {
        (number, kind, stays): list(moments_of(stage, kind, stays=stays))
        for number, stage in stages.items()
        for kind in ActionKind
        for stays in (False, True)
    }
    waiting = {
        number: stage.shape.item * (stage.blocks * stage.unit + stage.root)
        for number, stage in stages.items()
    }
    worst, base, others = Moment(""), 0, 0
    for each in dict.fromkeys(passes):
        waits, before = sum(waiting[number] for number in each.waiting), each.kept_besides
        if each.in_flight > 1 and each.kind is not ActionKind.FORWARD:
            before += stages[each.stage].moved  # the last block of the newest
        for moment in moments[each.stage, each.kind, each.stays]:
            if moment.total + waits + before > worst.total + base + others:
                worst, base, others = moment, waits, before
    return worst, base, others


def _passes(
    config: RunConfig,
    replica: Replica,
    at: Coordinate,
    stages: Mapping[int, Stage],
    number: int,
    staying: frozenset[int],
) -> Iterable[RankPass]:
    """The passes of a step of so many microbatches. staying: places in the share, of those whose
    gradients wait for those of the next one."""
    kept = {
        index: replace(found, kept=found.kept + stage.incoming - stage.blocks * stage.moved)
        for index, stage in stages.items()
        for found in (stage_bytes(config, replica, at, stage.shape.device, index),)
    }
    actions = rank_actions(config.layout.schedule, replica, at.pp, number)
    return rank_passes(actions, kept, staying)


def stages_of(
    config: RunConfig, topology: Topology, at: Coordinate, device: str
) -> dict[int, Stage]:
    """Return what the formulas need of each of a rank's stages, by its number."""
    replica = topology.replicas[at.replica]
    return {
        number: _stage(config, topology, at, device, number) for number in stages_on(replica, at)
    }


def _stage(
    config: RunConfig, topology: Topology, at: Coordinate, device: str, number: int
) -> Stage:
    model, replica = config.model, topology.replicas[at.replica]
    shape, tp = RankShape.of(config, replica, at, device), replica.degree("tp")
    blocks = blocks_of(config, replica, number)
    is_last, trains = is_last_stage(replica, number), shape.options.adapters is None
    embeds = number == 0 and trains
    first, held = tp_part(model.vocab_rows, tp, at.tp) if model.vocab_rows else (0, 0)
    policy = config.recompute_policy(at.pp, replica.degree("pp"), tp)
    unit = _elements(config, replica, at, (f"layers.{blocks[0]}.",))
    ties = is_last and model.has_tied_head and 0 not in stages_on(replica, at)
    has_rows = is_last and model.has_language_head
    holds_table = embeds or ties
    moves = config.train.memory.moves_activations
    is_copied = policy.word == "none" and shape.copies_input
    stays = not is_copied and policy.input_parts == 1
    zero = config.layout.zero_in_memory if replica.is_sharded else 1
    gathers = zero if zero > 1 else 0
    adds = max(microbatches(config).values()) > len(topology.replicas)
    adds |= config.train.memory.gradients != DEVICE  # a sum comes to the device first
    edges = shape.stream() * (not is_last) + shape.extra_of_first(policy, number, tp)
    edges -= shape.stream() if number - 1 in stages_on(replica, at) else 0
    return Stage(
        shape,
        len(blocks),
        policy,
        max(0, min(held, model.vocab_size - first)) if has_rows else 0,
        held if (has_rows and trains) or embeds else 0,
        embeds,
        model.has_tied_head,
        tp > 1 and config.layout.sequence_parallel,
        edges,
        unit,
        _elements(
            config, replica, at, ("embed",) * holds_table + ("norm", "head", "score") * is_last
        ),
        gathers,
        replica.degree("dp_shard") if gathers and adds else 0,
        loss_chunk(config, device),
        shape.moved(policy) if moves else 0,
        shape.stream() if moves and number > 0 and stays else 0,
        tp > 1,
    )


def _elements(
    config: RunConfig, replica: Replica, at: Coordinate, prefixes: tuple[str, ...]
) -> int:
    """Elements of the rank's parameters whose names begin so, before shards cut them."""
    table = (replace(row, shard_dim=None) for row in known_parameters(config))
    return sum(mesh_box(row, replica, at).size for row in table if row.name.startswith(prefixes))


def _messages(replica: Replica, at: Coordinate, number: int, stage: Stage) -> int:
    """Buffers of messages with stages of other ranks: the next input, and a gradient each way."""
    own = stages_on(replica, at)
    before = number > 0 and number - 1 not in own
    after = not is_last_stage(replica, number) and number + 1 not in own
    return stage.stream * (2 * before + after)


def _last_pack(config: RunConfig, replica: Replica, at: Coordinate, item: int) -> int:
    """Bytes of the buffer through which ZeRO 1 gathers the last of its small parameters. It stays
    until the next time."""
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
