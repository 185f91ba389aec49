"""Runs of four nodes with `layout: auto`, whose nodes are killed one after the other."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.nodes import Nodes, losses_of_one_worker, nodes_of

from holdfast.core.data.lineage import split_effective
from holdfast.elastic.protocol.fault_orders import FaultOrders
from holdfast.events import GenerationStarted, StepDone
from holdfast.layout import Topology

SETTINGS = (
    "train.steps=40",
    "train.batch_size=8",
    "train.evaluate.every=0",
    "train.precision=float64",
    "model.layers=2",
    "model.kv_heads=2",
    "checkpoint.every_steps=20",
    "checkpoint.memory_every_steps=1",
)
GATES = (10, 20, 30, 40)
LINKS = ((0.1, 100), (10.0, 20), (0.03, 10), (0.3, 500))  # Gbit/s, microseconds


@dataclass(frozen=True)
class Change:
    """One layout of a run. difference: of the losses of its steps from those of an undisturbed
    run, the largest, relative."""

    seed: int
    nodes: str
    layout: str
    steps: int
    difference: float

    def __str__(self) -> str:
        return (
            f"run {self.seed}: nodes {self.nodes:<5} meshes {self.layout:<34}"
            f"{self.steps:>3} steps, loss differs by {self.difference:.1e}"
        )


def undisturbed_losses(run_file: Path) -> dict[int, float]:
    return losses_of_one_worker(run_file, *SETTINGS)


def killed_run(
    run_file: Path, folder: Path, seed: int, reference: dict[int, float]
) -> Iterator[Change]:
    """Kill three of four nodes, in an order by the seed; then what each layout computed."""
    draw = random.Random(seed)
    cluster, gate = folder.with_suffix(".yaml"), FaultOrders(folder.with_suffix(".gate"))
    rate, latency = LINKS[seed % len(LINKS)]
    outside = f"{{gbit_s: {rate}, latency_us: {latency}}}"
    cluster.write_text(
        f"pools:\n  here: {{device: cpu, devices: 1, nodes: 4, outside: {outside}}}\n"
    )
    gate.prepare(GATES[0])
    auto = ("layout.mode=auto", "layout.workers=4", f"plan.cluster={cluster}")
    order = draw.sample("abcd", 4)
    with nodes_of(run_file, folder, *SETTINGS, *auto, f"cluster.faults={gate.folder}") as nodes:
        nodes.start(*"abcd")
        nodes.wait_step(GATES[0])
        for name, until in zip(order, GATES[1:], strict=False):
            before = len(nodes.events(GenerationStarted))
            has_work = name in nodes.nodes(nodes.newest)
            nodes.kill(name)
            if has_work:
                _wait_for_generation(nodes, before)
            gate.open_gate(until)
            nodes.wait_step(until)
        nodes.end()
    yield from _changes(nodes, seed, reference)


def _wait_for_generation(nodes: Nodes, before: int) -> None:
    nodes.wait_until(
        lambda: len(nodes.events(GenerationStarted)) > before, "no generation after a loss"
    )


def _changes(nodes: Nodes, seed: int, reference: dict[int, float]) -> Iterator[Change]:
    effective, _ = split_effective(nodes.records())
    done = [(r.generation, r.event) for r in effective if isinstance(r.event, StepDone)]
    for event in nodes.events(GenerationStarted):
        topology = Topology.from_json(event.topology)
        steps = [step for generation, step in done if generation == topology.generation]
        worst = max((abs(s.loss / reference[s.step] - 1) for s in steps), default=0.0)
        meshes = " ".join("x".join(map(str, each.mesh_shape)) for each in topology.replicas)
        yield Change(seed, "".join(sorted(topology.nodes)), meshes, len(steps), worst)
