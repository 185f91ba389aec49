"""Predicts the steps of a generation, for the run's journal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from holdfast.config.run import RunConfig
from holdfast.events import StepPredicted
from holdfast.layout import Topology
from holdfast.options.registry import unmodelled_option
from holdfast.plan.auto.machines import Machines
from holdfast.plan.hardware.cluster_file import HERE
from holdfast.plan.hardware.devices import device_named
from holdfast.plan.placing.interface import NodePlaces
from holdfast.plan.placing.topology_cost import Fleet, TopologyCost


def has_prediction(config: RunConfig) -> bool:
    """Return True if the cost model covers what the run computes."""
    layout = config.layout
    is_other = config.task.name or layout.is_asynchronous or config.computes_apart
    return not (is_other or unmodelled_option(config))


@dataclass(frozen=True)
class Predictor:
    """Predicts topologies of one run. machines: what its nodes are made of."""

    config: RunConfig
    machines: Machines

    def __call__(
        self, topology: Topology, cores_by_node: Mapping[str, str] | None = None
    ) -> StepPredicted:
        """Raises UserError for devices that are unknown. cores_by_node: equal for nodes that share
        one machine's cores: on a CPU they count as one node."""
        machines = self.machines
        if machines.cores and cores_by_node:
            names = tuple(cores_by_node.get(node, node) for node in topology.nodes)
            topology = replace(topology, nodes=names)
        counts = Counter(topology.nodes)
        if machines.cores:
            machines = machines.with_workers(max(counts.values()))
        pool = machines.cluster.pools[0]
        nodes = [NodePlaces(name, count) for name, count in counts.items()]
        cost = TopologyCost(self.config, Fleet(machines.devices, pool), nodes).cost(topology)
        measured = device_named(pool.device, machines.devices).measured
        source = f"measured {measured}" if measured else "assumed"
        if self.config.plan.cluster not in ("", HERE):  # whatever this run computes on
            source += f", for {pool.device} of plan.cluster"
        return StepPredicted(cost.step_s, dict(cost.parts), round(cost.peak_bytes), source)
