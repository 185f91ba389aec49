"""What a change of the grid costs, the same for every policy: who lost what, and how long it takes.

A place is a rank's number: replica * stages + stage. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import inf, sqrt

from holdfast.policy.saving.tiers import DISK
from holdfast_lab.engine.interfaces import (
    Costs,
    SavePlan,
    TierSave,
    View,
)

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
