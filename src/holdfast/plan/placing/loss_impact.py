"""The state left after a loss of ranks: the intact replicas, and the bytes without another copy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

from holdfast.config.run import RunConfig
from holdfast.core.sharding.boxes import Box, whole_box
from holdfast.core.sharding.optimizer_state import bytes_like
from holdfast.core.sharding.run_table import run_state_table
from holdfast.core.sharding.state_table import MIXED, TensorSpec, learner_shares, mesh_box
from holdfast.errors import LayoutError
from holdfast.layout import Coordinate, Replica, Topology, coordinates_of
from holdfast.plan.memory.memory_use import known_parameters
from holdfast.policy.recovery.survivors import missing_pieces


@dataclass(frozen=True)
class LossImpact:
    """After the loss of some ranks. positions: where in the model the bytes without a copy lie (-1
    embedding, i block i, layers norm and head)."""

    broken: tuple[int, ...]  # replicas that lost a rank
    whole: tuple[int, ...]  # replicas that could continue at once; none if learners are lost
    waiting: tuple[int, ...]  # ranks that are alive in a broken replica
    gone: int  # bytes of state without a copy outside the lost ranks
    of: int  # bytes of all state
    positions: tuple[int, ...]
    learners: int = 0  # of `outer` whose state is lost: then all begin from the newest snapshot


def impact_of_loss(config: RunConfig, topology: Topology, lost: frozenset[int]) -> LossImpact:
    """Take `lost` out of a topology. Raises LayoutError for a rank that is not in it."""
    unknown = sorted(rank for rank in lost if not 0 <= rank < topology.world_size)
    if unknown:
        raise LayoutError(
            f"rank {unknown[0]} is not in a world of {topology.world_size}",
            where="--what-if",
            remedy=f"use ranks 0 to {topology.world_size - 1}",
        )
    broken = tuple(r.index for r in topology.replicas if not lost.isdisjoint(r.ranks))
    learners = 0
    if kept_apart := [spec for spec in run_state_table(config) if spec.of_learners]:
        shares = learner_shares(config.outer.learners, len(topology.replicas))
        learners = sum(len(shares[index]) for index in broken)
    intact = tuple(r.index for r in topology.replicas if r.index not in broken)
    whole = () if learners else intact
    waiting = tuple(
        rank for index in broken for rank in topology.replicas[index].ranks if rank not in lost
    )
    gone, of = 0, 0
    positions: set[int] = set()
    for spec, nbytes in _state_tensors(config):
        of += nbytes
        if intact:
            continue  # a replica that lost no rank holds everything
        missing = _missing_elements(spec, topology.replicas, lost)
        if missing:
            gone += nbytes * missing // prod(spec.shape)
            positions.update(spec.positions)
    for spec in kept_apart:  # no other replica has a copy
        of += spec.nbytes
        gone += spec.nbytes * learners // config.outer.learners
        positions.update(spec.positions if learners else ())
    return LossImpact(broken, whole, waiting, gone, of, tuple(sorted(positions)), learners)


def _state_tensors(config: RunConfig) -> Iterable[tuple[TensorSpec, int]]:
    """(parameter, bytes of the state that is cut like it): itself and what the optimizer keeps
    in its shape. Under zero 1 every shard has the complete parameter, unless it computes
    on a copy of two bytes."""
    everywhere = config.layout.zero_in_memory == 1 and config.train.precision not in MIXED
    for spec in known_parameters(config):
        moments = bytes_like(config.train.optimizer, spec)
        if everywhere:
            yield replace(spec, shard_dim=None), spec.nbytes
            yield spec, moments
        else:
            yield spec, spec.nbytes + moments


def _missing_elements(spec: TensorSpec, replicas: tuple[Replica, ...], lost: frozenset[int]) -> int:
    """Return the elements of a tensor that no rank outside `lost` holds."""
    boxes: set[Box] = set()
    for replica in replicas:
        for mesh_rank, rank in enumerate(replica.ranks):
            if rank not in lost:
                at = Coordinate(
                    replica.index, mesh_rank, *coordinates_of(mesh_rank, replica.mesh_shape)
                )
                boxes.add(mesh_box(spec, replica, at))
    parts = [box for box in boxes if box.size]
    return sum(piece.size for piece in missing_pieces(whole_box(spec.name, spec.shape), parts))
