"""Layouts of run files as the planner sees them, and its choices as keys of a run file."""

from __future__ import annotations

from typing import Any

from holdfast.config.run import RunConfig
from holdfast.config.sections.layout import PART_KEYS, DegreesConfig, part_section
from holdfast.config.sections.memory import HOST
from holdfast.core.sharding.reduction_tree import deal
from holdfast.layout import AXES, Layout, place_replicas
from holdfast.plan.cost.choice import Choice
from holdfast.plan.placing.layouts import layouts_of
from holdfast.plan.placing.topology_cost import placed_choice
from holdfast.plan.step_microbatches import microbatches


def given_choice(config: RunConfig, pool: str) -> Choice:
    """The layout that a run file gives, with all replicas in one pool. Raises LayoutError."""
    layouts = layouts_of(config)
    world = sum(layout.world_size for layout in layouts)
    topology = place_replicas(layouts, 1, ("node",) * world)
    shares = deal(microbatches(config)[1], len(layouts))
    return placed_choice(config, topology, shares, lambda replica: pool)


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
    if choice.part_tp:
        values |= {f"layout.{key}": n for key, n in zip(PART_KEYS, choice.part_tp, strict=True)}
    alike = {(group.mesh_shape, group.stages) for group in choice.replicas}
    if len(alike) == 1:
        return values | {f"layout.{key}": value for key, value in _degrees(first).items()}
    unlike = [_degrees(group) for group in choice.replicas for _ in range(group.dp_replicate)]
    ones = {f"layout.{key}": value for key, value in _degrees(Layout()).items()}
    return values | ones | {"layout.replicas": unlike}


def _degrees(layout: Layout) -> dict[str, Any]:
    values: dict[str, Any] = dict(zip(AXES, layout.mesh_shape, strict=True))
    return values | {"stages": layout.stages if layout.pp > 1 else ()}


def with_choice(config: RunConfig, choice: Choice) -> RunConfig:
    """The run with another layout. Nothing is checked."""
    values = values_of(choice)
    layout = {k[7:]: v for k, v in values.items() if k.startswith("layout.")}
    train = {k[6:]: v for k, v in values.items() if k.startswith("train.")}
    if place := train.pop("memory.optimizer", ""):
        train["memory"] = config.train.memory.model_copy(update={"optimizer": place})
    parts = [layout.pop(key) for key in PART_KEYS if key in layout]
    if parts:
        layout |= part_section(parts)
    if "replicas" in layout:
        layout["replicas"] = tuple(map(DegreesConfig.model_validate, layout["replicas"]))
    sections = {"layout": layout, "train": train}
    changed = {k: getattr(config, k).model_copy(update=v) for k, v in sections.items()}
    return config.model_copy(update=changed)
