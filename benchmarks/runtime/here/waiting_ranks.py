"""Layouts of more ranks than this machine has cores: devices that wait, links that are shaped.

`waiting_rank.py` says what is real. The seconds of a layer's computing are those of the cost model.
The rest of a step follows from what the processes do. They keep the order of the table, their
messages share links, and sums of gradients travel behind the backward pass.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import quantiles
from typing import Any

from benchmarks.runtime.children import ROOT
from holdfast.config.run import RunConfig
from holdfast.plan.cost.choice import Choice, ReplicaChoice
from holdfast.plan.cost.evaluate import Evaluator, Problem, StepCost
from holdfast.plan.cost.group_links import group_links
from holdfast.plan.cost.layer_times import Part, ShapeTimes
from holdfast.plan.cost.run_workload import workload_of
from holdfast.plan.cost.workload import Layer
from holdfast.plan.hardware.cluster import Cluster, NodePool
from holdfast.plan.hardware.devices import DeviceType, Efficiency
from holdfast.plan.hardware.link import Link
from holdfast.plan.memory.stage_bytes import layer_parameters

POOL, DEVICE = "waiting", "waiting device"
STEPS = 4


@dataclass(frozen=True)
class WaitingCase:
    """One layout on one cluster of waiting devices."""

    name: str
    config: RunConfig
    choice: Choice
    pool: NodePool

    @property
    def problem(self) -> Problem:
        cluster = Cluster((self.pool,))
        return Problem(
            workload_of(self.config),
            cluster,
            {DEVICE: waiting_device()},
            bucket_bytes=1e6 * self.config.layout.bucket_mb,
        )

    def predicted(self) -> StepCost:
        return Evaluator(self.problem).cost(self.choice)


def waiting_device() -> DeviceType:
    """Slow enough that a layer takes milliseconds, which a process can wait for."""
    reached = Efficiency(1.0, 1.0, 50e-6, 10e-6)
    return DeviceType(DEVICE, {"fp32": 150e9}, 16e9, 20e9, 0, 0, 0, {"fp32": reached})


def run_of(batch: int, microbatch: int, **layout: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"preset": "small", "vocab_size": 2048},
            "data": {"sequence_length": 256},
            "train": {"batch_size": batch, "microbatch_size": microbatch, "precision": "fp32"},
            "layout": layout,
        }
    )


def pool_of(nodes: int, devices: int, inside: Link, outside: Link) -> NodePool:
    return NodePool(POOL, nodes, devices, DEVICE, inside, outside)


def drawn(seed: int) -> WaitingCase:
    """A seeded layout of 4 or 8 ranks."""
    draw = random.Random(seed)
    ranks = draw.choice([4, 8])
    devices = draw.choice([2, 4])
    inside = Link(draw.choice([2e-4, 5e-4]), draw.choice([200e6, 400e6]))
    outside = Link(draw.choice([5e-4, 1e-3]), draw.choice([50e6, 100e6]))
    pp, tp = draw.choice([(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 1), (1, 2)])
    rest = ranks // pp // tp
    shards = draw.choice([n for n in (1, 2, 4) if rest % n == 0])
    count = rest // shards
    schedule = draw.choice(["1f1b", "gpipe", "zb-h1", "interleaved"]) if pp > 1 else "1f1b"
    virtual = 2 if schedule == "interleaved" and pp == 2 else 1
    schedule = "1f1b" if schedule == "interleaved" and pp != 2 else schedule
    zero = draw.choice([1, 3]) if shards > 1 else 1
    number = draw.choice([4, 8])
    stages = _equal(6, pp * virtual) if pp > 1 else ()
    group = ReplicaChoice(count, pp, shards, 1, tp, stages, (POOL,), number)
    choice = Choice((group,), 2 * shards, schedule, virtual, zero)
    config = run_of(number * count * 2 * shards, 2 * shards)
    words = f"{ranks} ranks: {count} x pp{pp} shard{shards} tp{tp}"
    words += f" {schedule}" if pp > 1 else ""
    words += f" zero {zero}" if shards > 1 else ""
    return WaitingCase(words, config, choice, pool_of(ranks // devices, devices, inside, outside))


def _equal(blocks: int, stages: int) -> tuple[int, ...]:
    return tuple(blocks // stages + (i >= stages - blocks % stages) for i in range(stages))


def step_seconds(case: WaitingCase, steps: int = STEPS) -> float:
    """Seconds of a step: of the slowest rank, the lower quartile over all steps but the first."""
    with tempfile.TemporaryDirectory() as text:
        file = Path(text) / "case.json"
        file.write_text(json.dumps(_given(case, steps)))
        ranks = case.choice.devices
        command = [sys.executable, "-m", "benchmarks.runtime.here.waiting_rank", str(file)]
        workers = [
            subprocess.Popen(
                [*command, str(rank)],
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                start_new_session=True,
            )
            for rank in range(ranks)
        ]
        try:
            said = [worker.communicate(timeout=120)[0].splitlines() for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
    rows = list(zip(*([float(line) for line in lines] for lines in said), strict=True))
    if len(rows) != steps:
        raise RuntimeError(f"{case.name}: a rank ended early")
    slowest = [max(row) for row in rows[1:]]
    return float(quantiles(slowest, n=4, method="inclusive")[0] if slowest[1:] else slowest[0])


def _given(case: WaitingCase, steps: int) -> dict[str, Any]:
    problem, choice, pool = case.problem, case.choice, case.pool
    return {
        "kinds": [_kind(case, group) for group in choice.replicas],
        "per_node": pool.devices,
        "links": {
            "inside": (pool.inside.latency_s, pool.inside.bandwidth),
            "outside": (pool.outside.latency_s, pool.outside.bandwidth),
        },
        "schedule": choice.schedule,
        "virtual": choice.virtual,
        "zero": choice.zero,
        "bucket_bytes": problem.bucket_bytes,
        "update_s": case.predicted().parts.get("update", 0.0),
        "steps": steps,
    }


def _kind(case: WaitingCase, group: ReplicaChoice) -> dict[str, Any]:
    """Like replicas of the layout."""
    workload = case.problem.workload
    tokens = case.choice.microbatch * workload.sequence / group.dp_shard / group.cp
    stages = _stages(case, group)
    return {
        "mesh": group.mesh_shape,
        "replicas": group.dp_replicate,
        "microbatches": group.microbatches,
        "stages": [[_layer(case, group, layer) for layer in stage] for stage in stages],
        "send_bytes": tokens * workload.layers[0].width * workload.item / group.tp,
    }


def _stages(case: WaitingCase, group: ReplicaChoice) -> list[Sequence[Layer]]:
    workload = case.problem.workload
    if group.pp == 1:
        return [workload.layers]
    found: list[list[Layer]] = []
    first = 0
    for blocks in group.stages:
        found.append(list(workload.blocks[first : first + blocks]))
        first += blocks
    found[0].insert(0, workload.layers[0])
    found[-1].append(workload.layers[-1])
    return list(found)


def _layer(case: WaitingCase, group: ReplicaChoice, layer: Layer) -> dict[str, float]:
    """Computing alone, and the bytes of each message."""
    choice = case.choice
    workload, state = case.problem.workload, case.problem.workload.state
    tokens = choice.microbatch * workload.sequence / group.dp_shard / group.cp
    part = Part(tokens, workload.sequence, group.tp, group.cp)
    links = group_links(Cluster((case.pool,)), group, 0, choice.number_of_replicas)
    shapes = ShapeTimes(workload.precision, workload.item)
    times = shapes.of(layer, part, waiting_device(), links)
    sent = sum((times.communication or {}).values()) / 2
    own = layer_parameters(layer, group.tp, 1)
    most = max(each.tp for each in choice.replicas)
    return {
        "forward": times.forward - sent,
        "inputs": times.inputs - sent,
        "weights": times.weights,
        "sums": layer.reductions,
        "sum_bytes": tokens * layer.width * workload.item,
        "gradient_bytes": own * state.gradients,
        "bucket_bytes": layer_parameters(layer, most, 1) * state.gradients,
        "weight_bytes": own * state.weights,
    }


def with_links(case: WaitingCase, inside: Link, outside: Link) -> WaitingCase:
    return replace(case, pool=replace(case.pool, inside=inside, outside=outside))
