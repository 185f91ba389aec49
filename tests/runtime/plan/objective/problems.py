"""Small problems with round numbers: a model of a few blocks on a few nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from holdfast.config.loading.load import load_config
from holdfast.plan.cost.choice import Choice, ReplicaChoice
from holdfast.plan.cost.evaluate import Problem
from holdfast.plan.cost.run_workload import workload_of
from holdfast.plan.hardware.cluster import Cluster, NodePool
from holdfast.plan.hardware.devices import load_devices
from holdfast.plan.hardware.link import Link

BLOCKS = 24


def pool(name: str = "spot", nodes: int = 8, **settings: Any) -> NodePool:
    """Nodes of two A100 that lose a node often."""
    usual: dict[str, Any] = {
        "zone": "a",
        "is_spot": True,
        "usd_per_hour": 2.0,
        "losses_per_day": 9.2,
        "grams_co2_per_kwh": 400.0,
    }
    return NodePool(
        name, nodes, 2, "A100-80", Link(5e-6, 240e9), Link(20e-6, 12.5e9 / 2), **usual | settings
    )


def problem(*pools: NodePool, batch: int = 64) -> Problem:
    config = load_config(
        None,
        ["model.preset=350m", "data.sequence_length=1024", "train.precision=bf16", "device=cuda"],
    ).config
    workload = replace(workload_of(config), batch=batch)
    return Problem(workload, Cluster(pools or (pool(),)), load_devices())


def layout(count: int, pp: int, microbatches: int, pools: tuple[str, ...] = ("spot",)) -> Choice:
    """Replicas of `pp` stages of one device, with microbatches of one sample."""
    stages = tuple(BLOCKS // pp for _ in range(pp)) if pp > 1 else ()
    group = ReplicaChoice(count, pp, 1, 1, 1, stages, pools, microbatches)
    return Choice((group,), 1)
