"""Layouts of run files as the planner sees them, and its choices as keys of a run file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.config.run import RunConfig
from holdfast.config.sections.layout import DegreesConfig
from holdfast.config.sections.memory import HOST
from holdfast.core.sharding.reduction_tree import deal
from holdfast.layout import Topology, place_replicas
from holdfast.plan.cost.choice import Choice, ReplicaChoice
from holdfast.plan.placing.layouts import layouts_of
from holdfast.plan.placing.planner import dealer_of
from holdfast.plan.step_microbatches import microbatches

MOVED = ("optimizer", "gradients", "parameters", "activations")
"""Keys of `train.memory` that name places."""


def given_choice(config: RunConfig, pool: str) -> Choice:
    """The layout that a run file gives, with all replicas in one pool. Raises LayoutError."""
    layouts = layouts_of(config)
    world = sum(layout.world_size for layout in layouts)
    topology = place_replicas(layouts, 1, ("node",) * world)
    return choice_of(config, topology, pool, deal(microbatches(config)[1], len(layouts)))


def choice_of(
    config: RunConfig, topology: Topology, pool: str, shares: Sequence[Sequence[int]] | None = None
) -> Choice:
    """A placed layout. shares: the microbatches of each replica; None: by their weights."""
    number = microbatches(config)[1]
    if shares is None:
        shares = dealer_of(topology, config.layout.schedule)(number, len(topology.replicas))
    counts: dict[tuple[tuple[int, ...], tuple[int, ...], int], int] = {}
    for replica, share in zip(topology.replicas, shares, strict=True):
        kind = (*replica.kind, len(share))
        counts[kind] = counts.get(kind, 0) + 1
    layout = config.layout
    groups = tuple(
        _group(config, count, mesh, stages, share, pool)
        for (mesh, stages, share), count in counts.items()
    )
    is_cut = any(group.pp > 1 for group in groups)
    return Choice(
        groups,
        config.train.microbatch_size,
        layout.schedule if is_cut else "1f1b",
        layout.stages_a_worker if is_cut else 1,
        layout.zero_in_memory,
        layout.ep,
        layout.sequence_parallel,
        frozenset(key for key in MOVED if getattr(config.train.memory, key) != "device"),
    )


def _group(
    config: RunConfig,
    count: int,
    mesh: tuple[int, ...],
    stages: tuple[int, ...],
    microbatches: int,
    pool: str,
) -> ReplicaChoice:
    pp, dp_shard, cp, tp = mesh
    words = _words(config, pp)
    return ReplicaChoice(count, pp, dp_shard, cp, tp, stages, (pool,), microbatches, words)


def _words(config: RunConfig, pp: int) -> tuple[str, ...]:
    words = tuple(config.train.recompute_of(stage, pp) for stage in range(pp))
    return words if len(set(words)) > 1 else words[:1]


def values_of(choice: Choice) -> dict[str, Any]:
    """Keys of the run file with the values of a chosen layout."""
    first = choice.replicas[0]
    is_cut = any(group.pp > 1 for group in choice.replicas)
    values: dict[str, Any] = {
        "layout.workers": choice.devices,
        "layout.zero": choice.zero,
        "layout.ep": choice.ep,
        "layout.sequence_parallel": choice.sequence_parallel,
        "layout.schedule": choice.schedule if is_cut else "1f1b",
        "layout.virtual_stages": choice.virtual if choice.schedule == "interleaved" else 0,
        "train.recompute": first.recompute[0] if len(first.recompute) == 1 else first.recompute,
        "train.microbatch_size": choice.microbatch,
    }
    if "optimizer" in choice.host:
        values["train.memory.optimizer"] = HOST
    alike = {(group.mesh_shape, group.stages) for group in choice.replicas}
    if len(alike) == 1:
        return values | {f"layout.{key}": value for key, value in _degrees(first).items()}
    unlike = [_degrees(group) for group in choice.replicas for _ in range(group.count)]
    ones = {f"layout.{key}": value for key, value in _ONE.items()}
    return values | ones | {"layout.replicas": unlike}


_ONE: Mapping[str, Any] = {"pp": 1, "dp_shard": 1, "cp": 1, "tp": 1, "stages": ()}


def _degrees(group: ReplicaChoice) -> dict[str, Any]:
    return {
        "pp": group.pp,
        "dp_shard": group.dp_shard,
        "cp": group.cp,
        "tp": group.tp,
        "stages": group.stages if group.pp > 1 else (),
    }


def with_choice(config: RunConfig, choice: Choice) -> RunConfig:
    """The run with another layout. Nothing is checked."""
    values = values_of(choice)
    layout = {k[7:]: v for k, v in values.items() if k.startswith("layout.")}
    train = {k[6:]: v for k, v in values.items() if k.startswith("train.")}
    if place := train.pop("memory.optimizer", ""):
        train["memory"] = config.train.memory.model_copy(update={"optimizer": place})
    if "replicas" in layout:
        layout["replicas"] = tuple(map(DegreesConfig.model_validate, layout["replicas"]))
    return config.model_copy(
        update={
            "layout": config.layout.model_copy(update=layout),
            "train": config.train.model_copy(update=train),
        }
    )
