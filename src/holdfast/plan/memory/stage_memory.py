"""The peak memory of each worker of a pipeline, for any numbers of blocks on its stages.

A worker's peak is the estimate of `estimate.py`, for a pipeline whose other stages have one block
each. It does not depend on what those hold.

Nothing here depends on the number of replicas that are left after a loss, so a loss moves no
block of those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from holdfast.config.run import RunConfig
from holdfast.errors import LayoutError
from holdfast.layout import Layout, MeshShape, place_replicas
from holdfast.plan.memory.activations import device_kind, without_estimate
from holdfast.plan.memory.estimate import rank_estimate
from holdfast.plan.step_microbatches import microbatches

_MOST_REPLICAS = 8
"""Replicas that the estimate has. More of them add next to nothing to a rank's buffers."""


def check_memory_formula(config: RunConfig) -> None:
    """Raises LayoutError for a run whose stages have no estimate of memory."""
    key = without_estimate(config)
    if not key:
        return
    raise LayoutError(
        f"memory has no formula for a run with {key}",
        where="layout.balance",
        remedy="use layout.balance time",
    )


class PipelineMemory:
    """Peaks of the workers of one pipeline."""

    def __init__(self, config: RunConfig, mesh_shape: MeshShape):
        check_memory_formula(config)
        self._config, self._mesh_shape = config, mesh_shape
        layout = config.layout
        whole = max(1, len(layout.replicas) or layout.workers // prod(mesh_shape))
        self._share = max(1, -(-max(microbatches(config).values()) // whole))
        self._replicas = min(whole, _MOST_REPLICAS)

    def peak(self, worker: int, blocks: Mapping[int, int]) -> int:
        """The most bytes on a worker. blocks: stage -> blocks, for each of its stages."""
        layout, mesh = self._config.layout, self._mesh_shape
        stages = tuple(blocks.get(stage, 1) for stage in range(mesh[0] * layout.stages_a_worker))
        one = Layout.of_mesh(mesh, stages, is_folded=layout.is_folded)
        config = _shortened(self._config, self._share * self._replicas, stages, mesh[1])
        nodes = ("node",) * (self._replicas * one.replica_size)
        topology = place_replicas([one] * self._replicas, 1, nodes)
        at = topology.coordinate(topology.replicas[0].rank_at(pp=worker))
        return rank_estimate(config, topology, at, device_kind(config)).peak


def _shortened(config: RunConfig, number: int, stages: Sequence[int], shards: int) -> RunConfig:
    """The run with so many microbatches a step, and as many blocks as these stages have."""
    size = max(config.train.microbatch_size, shards)
    update = {"microbatch_size": size, "batch_size": number * size, "batch_warmup": ()}
    train = config.train.model_copy(update=update)
    model = config.model.model_copy(update={"layers": sum(stages)})
    return config.model_copy(update={"train": train, "model": model})
