"""The one cost model of all policies: throughput of a grid of replicas by pipeline stages. Pure.

Every trainer of the comparison spreads a model over `dp` equal replicas of `pp` stages, with one
node for each stage. So one function of (dp, pp) says how fast each of them trains.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil, inf, sqrt
from typing import Protocol, runtime_checkable

from holdfast.policy.saving.tiers import DISK
from holdfast_lab.engine.interfaces import (
    CostModel,
    Costs,
    OperatingPoint,
    SavePlan,
    TierSave,
    View,
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
class GridCost:
    """Tokens a second by (dp, pp), with the constants that all policies pay alike.

    batch_tokens: of a step, whatever the layout. microbatches: of a step, over all replicas.
    """

    rates: Mapping[Shape, float]
    batch_tokens: float
    microbatches: int
    costs: Costs = field(default_factory=Costs)

    @cached_property
    def shapes(self) -> tuple[Shape, ...]:
        return tuple(sorted(self.rates))

    @cached_property
    def wanted(self) -> int:
        """Nodes of the fastest layout."""
        return (
            max(self.rates, key=lambda shape: self.rates[shape])[0]
            * max(self.rates, key=lambda shape: self.rates[shape])[1]
        )

    @cached_property
    def _points(self) -> Mapping[Shape, OperatingPoint]:
        return {
            (dp, pp): OperatingPoint(
                f"{dp} x {pp}",
                dp * pp,
                rate,
                self.batch_tokens / rate,
                dp,
                dp * pp * self.costs.busy_watts,
            )
            for (dp, pp), rate in self.rates.items()
        }

    @cached_property
    def _best(self) -> tuple[OperatingPoint | None, ...]:
        """The fastest layout on at most so many nodes; of equal ones that on the fewest nodes."""
        best: list[OperatingPoint | None] = [None]
        for nodes in range(1, max(dp * pp for dp, pp in self.rates) + 1):
            found = best[-1]
            for (dp, pp), rate in sorted(self.rates.items()):
                if dp * pp == nodes and (found is None or rate > found.tokens_per_s):
                    found = self._points[dp, pp]
            best.append(found)
        return tuple(best)

    def point(self, nodes: int) -> OperatingPoint | None:
        return self._best[max(0, min(nodes, len(self._best) - 1))]

    def shaped(self, replicas: int, nodes_per_replica: int) -> OperatingPoint | None:
        return self._points.get((replicas, nodes_per_replica))

    def idle_share(self, dp: int, pp: int) -> float:
        return (pp - 1) / (ceil(self.microbatches / dp) + pp - 1)


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


def replicas_hit(lost: Collection[int], stages: int) -> set[int]:
    """Replicas that a loss of these places breaks."""
    return {place // stages for place in lost}


def survivors(view: View, lost: Collection[int]) -> list[str]:
    """Names of the nodes in use that are left, in the order of ranks."""
    gone = set(lost)
    return [name for place, name in enumerate(view.used) if place not in gone]


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


def stage_order(holders: Sequence[Sequence[str]], replicas: int) -> tuple[str, ...]:
    """Nodes in the order of ranks from the nodes of each stage, `replicas` of each."""
    return tuple(stage[replica] for replica in range(replicas) for stage in holders)
