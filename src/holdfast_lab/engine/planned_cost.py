"""A cost model from a plan: the planner says which layout runs on so many nodes, and how fast.

`plan/objective/goodput.py` gives the layout for every number of nodes, as a plan with failures
counts it, and remembers it. Nodes of all pools count alike, as a trace does not name pools. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from holdfast.plan.cost.choice import Choice
from holdfast.plan.cost.evaluate import StepCost
from holdfast.plan.explain.figures import words_of_layout
from holdfast.plan.hardware.devices import device_named
from holdfast.plan.objective.energy import JOULES_PER_KWH, kwh_per_step
from holdfast.plan.objective.goodput import GoodputModel
from holdfast.plan.objective.occupancy import nodes_used, with_replicas
from holdfast.plan.objective.recoveries import state_sizes, topology_of
from holdfast_lab.engine.interfaces import Costs, OperatingPoint

_CPU_START_S, _START_S = 6.0, 30.0


@dataclass
class PlannedCost:
    """model: with the problem. choice, step: the layout on all nodes."""

    model: GoodputModel
    choice: Choice
    step: StepCost
    costs: Costs
    _points: dict[int, OperatingPoint | None] = field(default_factory=dict)
    _shapes: dict[tuple[int, int], OperatingPoint | None] = field(default_factory=dict)

    @property
    def wanted(self) -> int:
        return sum(self._pools().values())

    def _pools(self) -> Mapping[str, int]:
        return nodes_used(self.model.problem.cluster, self.choice)

    def point(self, nodes: int) -> OperatingPoint | None:
        nodes = min(nodes, self.wanted)
        if nodes not in self._points:
            self._points[nodes] = self._point(nodes)
        return self._points[nodes]

    def _point(self, nodes: int) -> OperatingPoint | None:
        """The fastest of all that fit; a layout on fewer nodes may be faster."""
        if nodes <= 0:
            return None
        fewer = self.point(nodes - 1)
        present, left = {}, nodes
        for pool, number in self._pools().items():
            present[pool] = min(number, left)
            left -= present[pool]
        problem = self.model.problem
        layout, rate = self.model.layout_on(self.choice, self.step, present)
        if nodes == self.wanted:
            return self._at_work(self.choice, problem.workload.step_tokens / self.step.step_s)
        if layout is None or (fewer is not None and fewer.tokens_per_s >= rate):
            return fewer
        return self._at_work(layout, rate)

    def _at_work(self, layout: Choice, rate: float) -> OperatingPoint:
        problem = self.model.problem
        step_s = problem.workload.step_tokens / rate
        found = self.model.evaluator.cost(layout)
        watts = kwh_per_step(problem, layout, found) * JOULES_PER_KWH / step_s
        nodes = sum(nodes_used(problem.cluster, layout).values())
        replicas = sum(group.dp_replicate for group in layout.replicas)
        places = iter(map(str, range(nodes)))
        by_pool = {
            name: list(islice(places, number))
            for name, number in nodes_used(problem.cluster, layout).items()
        }
        topology = topology_of(problem.cluster, layout, by_pool)
        sizes = state_sizes(problem.workload)
        words = words_of_layout(layout, problem.cluster)
        return OperatingPoint(words, nodes, rate, step_s, replicas, watts, topology, sizes)

    def shaped(self, replicas: int, nodes_per_replica: int) -> OperatingPoint | None:
        """Fewer of the plan's replicas. A plan knows no other shape of them."""
        key = replicas, nodes_per_replica
        if key not in self._shapes:
            self._shapes[key] = self._shaped(replicas, nodes_per_replica)
        return self._shapes[key]

    def _shaped(self, replicas: int, nodes_per_replica: int) -> OperatingPoint | None:
        group = self.choice.replicas[0]
        full = self.point(self.wanted)
        if full is None or len(self.choice.replicas) > 1 or not 0 < replicas <= group.dp_replicate:
            return None
        if nodes_per_replica != full.nodes_per_replica:
            return None
        layout = with_replicas(self.choice, (replicas,))
        if layout is None:
            return None
        found = self.model.evaluator.cost(layout)
        return self._at_work(layout, self.model.problem.workload.step_tokens / found.step_s)


def planned_cost(model: GoodputModel, choice: Choice, step: StepCost) -> PlannedCost:
    """The cost model of a plan, with the constants of its RecoveryCosts."""
    return PlannedCost(model, choice, step, costs_of_plan(model, choice))


def costs_of_plan(model: GoodputModel, choice: Choice) -> Costs:
    problem, recovery = model.problem, model.costs
    pools = [problem.cluster.pool(name) for name in nodes_used(problem.cluster, choice)]
    devices = [device_named(pool.device, problem.devices) for pool in pools]
    is_cpu = all(device.name == "cpu" for device in devices)
    nodes = nodes_used(problem.cluster, choice)
    peer = min(pool.devices * pool.outside.bandwidth for pool in pools)
    return Costs(
        state_bytes=problem.workload.parameters * problem.workload.state.optimizer,
        detection_s=recovery.detection_s,
        start_s=_CPU_START_S if is_cpu else _START_S,
        regroup_s=recovery.rung_s[4],
        communicator_s=0.0 if is_cpu else recovery.communicator_s,
        node_store_bandwidth=recovery.store_bandwidth,
        peer_bandwidth=peer,
        save_pause_s=recovery.save_pause_s,
        sent_share=recovery.sent_share,
        usd_per_node_hour=_mean([(p.usd_per_hour, nodes[p.name]) for p in pools]),
        grams_co2_per_kwh=_mean([(p.grams_co2_per_kwh, nodes[p.name]) for p in pools]),
        busy_watts=max(d.power_w * p.devices for d, p in zip(devices, pools, strict=True)),
        idle_watts=max(d.idle_w * p.devices for d, p in zip(devices, pools, strict=True)),
    )


def _mean(values: Sequence[tuple[float | None, int]]) -> float:
    """The mean of values with weights; 0 if one of them is not known, so none is shown."""
    known = [value * number for value, number in values if value is not None]
    return sum(known) / sum(n for _, n in values) if len(known) == len(values) else 0.0
