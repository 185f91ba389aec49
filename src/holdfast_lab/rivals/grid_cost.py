"""The one cost model of all policies: throughput of a grid of replicas by pipeline stages. Pure.

Every trainer of the comparison spreads a model over `dp` equal replicas of `pp` stages, with one
node for each stage. So one function of (dp, pp) says how fast each of them trains.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import inf, sqrt
from typing import Protocol, runtime_checkable

from holdfast.policy.saving.tiers import DISK
from holdfast_lab.engine.interfaces import (
    CostModel,
    Costs,
    OperatingPoint,
    SavePlan,
    TierSave,
    View,
    slowest,
)

Shape = tuple[int, int]
"""(replicas, stages of each)."""

FORWARD_SHARE = 1 / 3
"""Of the operations of a step that are the forward pass: a backward pass has two for each."""


@runtime_checkable
class GridModel(CostModel, Protocol):
    """A cost model that also lists its layouts."""

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """All layouts that fit."""
        ...

    def idle_share(self, dp: int, pp: int) -> float:
        """Share of a step in which a stage waits for the first or the last microbatch."""
        ...


@dataclass(frozen=True)
class ListedGrid:
    """Lists layouts for a cost model that does not: those with a depth of one of its best ones.

    Its pipelines' idle time is not known, so that nothing hides in it.
    """

    model: CostModel

    @property
    def costs(self) -> Costs:
        return self.model.costs

    @property
    def wanted(self) -> int:
        return self.model.wanted

    def point(self, nodes: int) -> OperatingPoint | None:
        return self.model.point(nodes)

    def shaped(self, replicas: int, nodes_per_replica: int) -> OperatingPoint | None:
        return self.model.shaped(replicas, nodes_per_replica)

    @cached_property
    def shapes(self) -> tuple[Shape, ...]:
        best = (self.model.point(nodes) for nodes in range(1, self.wanted + 1))
        depths = {point.nodes_per_replica for point in best if point is not None}
        return tuple(
            (dp, pp)
            for pp in sorted(depths)
            for dp in range(1, self.wanted // pp + 1)
            if self.model.shaped(dp, pp) is not None
        )

    def idle_share(self, dp: int, pp: int) -> float:
        return 0.0


def as_grid(model: CostModel) -> GridModel:
    """The model itself if it lists its layouts."""
    return model if isinstance(model, GridModel) else ListedGrid(model)


# --- moves ----------------------------------------------------------------------------------------
RECOVERY, STARTUP = "recovery", "startup"


def idle_nodes(view: View) -> list[str]:
    """Nodes without work that have no notice, the oldest first."""
    used = set(view.used)
    return [n for n, node in view.nodes.items() if n not in used and node.leaves_s == inf]


def restart_s(costs: Costs, nodes: int, replicas: int) -> float:
    """All processes start again and every replica loads the state from the run store."""
    return costs.start_s + costs.regroup_s + costs.communicator_s + costs.store_s(nodes, replicas)


def regroup_s(costs: Costs, moved_share: float = 0.0) -> float:
    """Living processes form new groups. moved_share: of the state, the largest part that one node
    receives from other nodes first."""
    return (
        costs.regroup_s
        + costs.communicator_s
        + moved_share * costs.state_bytes / costs.peer_bandwidth
    )


@dataclass
class YoungSaves:
    """Saves into the run store at Young's interval, by the rate that the run has seen so far.

    A save is asynchronous and costs training the pause that ours has.

    The interval is sqrt(2 C / r) for a save that costs C and failures at the rate r (Young, CACM
    17(9), 1974). It is at least the time until a save is durable. prior_s: seconds in which the
    run counts one failure before the first.
    """

    prior_s: float = 3600.0
    failures: int = 0

    def saw_failure(self) -> None:
        self.failures += 1

    def interval_s(self, blocked_s: float, now: float) -> float:
        rate = (self.failures + 1) / (now + self.prior_s)
        return sqrt(2 * blocked_s / rate)

    def plan(self, view: View, costs: Costs) -> SavePlan:
        nodes = view.point.nodes if view.point else 1
        blocked, durable = costs.save_pause_s, costs.store_s(nodes)
        interval = max(self.interval_s(blocked, view.now), durable, 1e-3)
        save = TierSave(DISK, interval, blocked, durable, costs.state_bytes)
        return SavePlan((save,), review_s=1800.0)


@dataclass
class YoungPolicy:
    """Base of policies that save at Young's interval, and do nothing about slow nodes."""

    cost: CostModel
    _saves: YoungSaves = field(default_factory=YoungSaves, kw_only=True)

    def saves(self, view: View) -> SavePlan:
        return self._saves.plan(view, self.cost.costs)

    def slowdown(self, view: View) -> float:
        return slowest(view)
