"""Replicas that a run may have: the run file's own, and smaller ones for remaining workers.

A smaller replica has no degree above the run file's. For a number of workers, the preferred replica
has a shorter pipeline. The next choices are a lower dp_shard and a lower cp, the last a lower tp.
As tp cuts every block, its planned group stays inside a node. A pipeline fits any number of
workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, product
from math import prod
from typing import Any

from holdfast.config.run import RunConfig
from holdfast.config.sections.degrees import find_impossible_degrees
from holdfast.config.sections.layout import DegreesConfig, LayoutConfig
from holdfast.config.sections.optimizer import ALL, ELEMENTWISE
from holdfast.config.sections.pipeline_schedules import SCHEDULE_KINDS
from holdfast.core.sharding.run_table import run_block_costs
from holdfast.core.sharding.state_table import ITEM_BYTES, STATE_DTYPE
from holdfast.errors import LayoutError
from holdfast.layout import AXES, Coordinate, Layout, MeshShape, Stages, coordinates_of
from holdfast.plan.memory.memory_use import known_parameters, memory_of
from holdfast.plan.memory.placed_memory import bytes_in_memory
from holdfast.plan.placing.balance import planned_stages
from holdfast.policy.recovery.state_parts import overlap_share


class AllowedShapes:
    """Of one run file. memory: bytes that parameters, gradients and moments may take on one
    worker (`plan.memory.memory_use`); None for no bound.

    configured: the run file's replicas, one of each kind in its order. Raises LayoutError when none
    of them can be held.
    """

    def __init__(self, config: RunConfig, memory: int | None = None):
        self.config, self.memory = config, memory
        self._table = known_parameters(config)
        self._needed_bytes_of: dict[MeshShape, int] = {}
        kinds: Sequence[DegreesConfig] = config.layout.replicas or (config.layout,)
        self.configured = tuple(self._shape(d.mesh_shape, d.stages) for d in kinds)
        if memory is not None and not any(self.fits_memory(shape) for shape in self.configured):
            raise self._too_large_error(kinds)

    def fits_memory(self, shape: Layout) -> bool:
        return self.memory is None or self.needed_bytes(shape) <= self.memory

    def needed_bytes(self, shape: Layout) -> int:
        """Bytes of memory on the worker that holds the most: no part is larger than the first."""
        if shape.mesh_shape not in self._needed_bytes_of:
            config, replica = self.config, shape.replica(0, 0)
            places = (Coordinate(0, replica.rank_at(pp), pp, 0, 0, 0) for pp in range(shape.pp))
            self._needed_bytes_of[shape.mesh_shape] = max(
                bytes_in_memory(config, memory_of(config, self._table, replica, at))
                for at in places
            )
        return self._needed_bytes_of[shape.mesh_shape]

    @cached_property
    def smaller_shapes(self) -> tuple[Layout, ...]:
        """At most two for a number of workers: the preferred one, and one that needs the fewest
        microbatches. Large ones first."""
        meshes: dict[MeshShape, None] = {}
        for shape in self.configured:
            pp, shards, cp, tp = (range(1, degree + 1) for degree in shape.mesh_shape)
            meshes |= dict.fromkeys(product(pp, shards, cp, tp))
        allowed = [mesh for mesh in meshes if mesh in self._degree_rules]
        by_size: dict[int, list[MeshShape]] = {}
        for mesh in sorted(allowed, key=lambda m: (-m[3], -m[2], -m[1], -m[0])):
            if self._mesh_fits(mesh):
                by_size.setdefault(prod(mesh), []).append(mesh)
        chosen: list[Layout] = []
        for size in sorted(by_size, reverse=True):
            first, fewest = by_size[size][0], min(by_size[size], key=lambda m: m[0])
            chosen += [self._shape_of_mesh(mesh) for mesh in dict.fromkeys((first, fewest))]
        return tuple(chosen)

    def is_allowed(self, mesh_shape: MeshShape) -> bool:
        """Return True if an existing replica may stay."""
        inside = any(
            all(degree <= most for degree, most in zip(mesh_shape, s.mesh_shape, strict=True))
            for s in self.configured
        )
        return inside and mesh_shape in self._degree_rules and self._mesh_fits(mesh_shape)

    def min_microbatches(self, shape: Layout) -> int:
        """Return the microbatches that a replica needs in every step."""
        return SCHEDULE_KINDS[self.config.layout.schedule].least_microbatches(shape.pp)

    # --- parts ------------------------------------------------------------------------------
    def _mesh_fits(self, mesh_shape: MeshShape) -> bool:
        """As `fits_memory`; without a bound, no stages are planned for it."""
        return self.memory is None or self.fits_memory(self._shape_of_mesh(mesh_shape))

    def _shape_of_mesh(self, mesh_shape: MeshShape) -> Layout:
        """Return the run file's shape, or one with balanced stages if the file names none."""
        wanted = next((s for s in self.configured if s.mesh_shape == mesh_shape), None)
        return wanted or self._shape(mesh_shape, ())

    def _shape(self, mesh_shape: MeshShape, stages: Stages) -> Layout:
        is_folded = mesh_shape[0] > 1 and self.config.layout.is_folded
        stages = stages or self._stages(mesh_shape)
        return Layout.of_mesh(mesh_shape, stages, is_folded=is_folded)

    def _stages(self, mesh_shape: MeshShape) -> Stages:
        # time depends on the pipeline alone
        key: object = mesh_shape if self.config.layout.balance == "memory" else mesh_shape[0]
        if key not in self._balanced_stages:
            self._balanced_stages[key] = planned_stages(self.config, mesh_shape)
        return self._balanced_stages[key]

    @cached_property
    def _balanced_stages(self) -> dict[object, Stages]:
        return {}

    @cached_property
    def _degree_rules(self) -> DegreeRules:
        return DegreeRules(self.config)

    def _too_large_error(self, kinds: Sequence[DegreesConfig]) -> LayoutError:
        smallest = min(self.configured, key=self.needed_bytes)
        degrees = kinds[self.configured.index(smallest)]
        return LayoutError(
            f"one of the {degrees.ranks} workers of a replica holds "
            f"{self.needed_bytes(smallest):,} bytes "
            f"of parameters, gradients and moments, but {self.memory:,} are allowed",
            where="layout.replicas" if self.config.layout.replicas else "layout",
            remedy="raise dp_shard, tp or pp, or allow more memory",
        )


class DegreeRules:
    """Return True if the rules of the run file allow degrees. Each axis has its own, but that of cp
    looks at tp too."""

    def __init__(self, config: RunConfig):
        self._config = config
        self._known: dict[tuple[tuple[str, int], ...], bool] = {}

    def __contains__(self, mesh_shape: MeshShape) -> bool:
        degrees = dict(zip(AXES, mesh_shape, strict=True))
        alone = [((axis, degree),) for axis, degree in degrees.items() if axis != "cp"]
        return all(map(self._is_allowed, [*alone, (("cp", degrees["cp"]), ("tp", degrees["tp"]))]))

    def _is_allowed(self, degrees: tuple[tuple[str, int], ...]) -> bool:
        if degrees not in self._known:
            config = self._config
            layout = config.layout
            given: dict[str, Any] = {"cp_method": layout.cp_method, "cp_ring": layout.cp_ring}
            tp = dict(degrees).get("tp", 1)
            given |= layout.component_keys(tp)
            refused = find_impossible_degrees(
                LayoutConfig.model_validate(dict(degrees) | given),
                config.model,
                config.train,
                config.data.sequence_length,
                config.module_cuts,
            )
            self._known[degrees] = refused is None
        return self._known[degrees]


class StateOverlap:
    """Return the bytes of state that one place of a replica shares with a place of another. It is
    an estimate: cuts are taken as exact fractions, tp's and dp_shard's as independent.
    """

    def __init__(self, config: RunConfig):
        costs = run_block_costs(config)
        train = config.train
        moments = sum(s.rule == ELEMENTWISE and s.of == ALL for s in train.optimizer.state_slots)
        item = ITEM_BYTES[STATE_DTYPE[train.precision]]
        one = item + moments * (train.optimizer.moment_bytes or item)
        self._before = [one * n for n in accumulate(costs.parameters, initial=0)]
        self._first, self._last = one * costs.first[1], one * costs.last[1]
        self._known: dict[tuple[MeshShape, Stages, int, MeshShape, Stages, int], int] = {}

    def common_bytes(
        self,
        old: MeshShape,
        old_stages: Stages,
        old_rank: int,
        new: MeshShape,
        new_stages: Stages,
        new_rank: int,
    ) -> int:
        """Bytes of what mesh rank `old_rank` of an old replica holds that mesh rank `new_rank` of a
        new one is to hold."""
        key = (old, old_stages, old_rank, new, new_stages, new_rank)
        if key not in self._known:
            a, b = coordinates_of(old_rank, old), coordinates_of(new_rank, new)
            blocks = self._blocks(old_stages, a[0], new_stages, b[0], old[0], new[0])
            shard, tp = (overlap_share((a[n], old[n]), (b[n], new[n])) for n in (1, 3))
            self._known[key] = round(blocks * (shard * tp))
        return self._known[key]

    def total_bytes(self, shape: Layout, at: int) -> int:
        """Bytes that mesh rank `at` holds."""
        mesh, stages = shape.mesh_shape, shape.stages
        return self.common_bytes(mesh, stages, at, mesh, stages, at)

    def _blocks(self, was: Stages, a: int, will: Stages, b: int, pp_a: int, pp_b: int) -> int:
        low, high = self._block_range(was, a, pp_a)
        start, stop = self._block_range(will, b, pp_b)
        first, last = max(low, start), min(high, stop)
        found = self._before[last] - self._before[first] if first < last else 0
        found += self._first if a == b == 0 else 0
        found += self._last if a == pp_a - 1 and b == pp_b - 1 else 0
        return found

    def _block_range(self, stages: Stages, stage: int, pp: int) -> tuple[int, int]:
        if pp == 1:
            return 0, len(self._before) - 1
        before = sum(stages[:stage])
        return before, before + stages[stage]
