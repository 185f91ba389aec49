"""Replica groups as in torchft: survivors continue, a new group copies the state of a peer."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from holdfast.policy.saving.tiers import DISK
from holdfast_lab.engine.interfaces import (
    SAVE,
    STEP,
    Change,
    Decision,
    OperatingPoint,
    Transition,
    View,
)
from holdfast_lab.rivals.grid_cost import (
    RECOVERY,
    STARTUP,
    GridModel,
    YoungPolicy,
    idle_nodes,
    regroup_s,
    restart_s,
)


@dataclass
class TorchftPolicy(YoungPolicy):
    """A replica group of fixed depth is the unit of failure (meta-pytorch/torchft, README and
    `manager.py`).

    A lost node breaks its group; the other groups form a new quorum and discard the step. A
    group that is complete again copies its state from a healthy one, while the rest train; it
    counts from the next quorum. Depth does not change. A checkpoint serves the case in which no
    group is left. Two assumptions favour it. Detection is that of all policies, not the time-out
    of a collective (60 s by default). The global batch is held.

    stages: of a group; None: those of the fastest layout on the nodes at the start.
    """

    cost: GridModel
    stages: int | None = None
    name: str = "torchft"
    _ready_at: float = inf
    _healing: tuple[str, ...] = ()

    def decide(self, view: View, change: Change) -> Decision:
        if any(name not in view.nodes for name in self._healing):
            self._healing, self._ready_at = (), inf
        if change.lost:
            transition: Transition | None = self._lose(view, change)
        elif view.point is None or self.stages is None:
            transition = self._start(view)
        else:
            transition = self._grow(view)
        return Decision(transition, self._next_review(view, transition))

    def _depth(self) -> int:
        return self.stages or 1

    def _point(self, groups: int) -> OperatingPoint | None:
        """The fastest number of groups, of at most so many."""
        found = [self.cost.shaped(dp, self._depth()) for dp in range(1, groups + 1)]
        points = [point for point in found if point is not None]
        return max(points, key=lambda point: point.tokens_per_s, default=None)

    def _lose(self, view: View, change: Change) -> Transition | None:
        depth, costs = self._depth(), self.cost.costs
        hit = {place // depth for place in change.lost}
        groups = len(view.used) // depth
        complete = [
            view.used[group * depth : (group + 1) * depth]
            for group in range(groups)
            if group not in hit
        ]
        left = self._point(len(complete))
        if left is None:
            self._saves.saw_failure()
            return self._restart(view, SAVE, costs.detection_s)
        used = tuple(name for group in complete[: left.replicas] for name in group)
        pause = max(costs.detection_s + regroup_s(costs), view.pause_left)
        return Transition(left, ((RECOVERY, pause),), STEP, used=used, reason="groups continue")

    def _start(self, view: View) -> Transition | None:
        if self.stages is None:
            best = self.cost.point(len(view.nodes))
            if best is None:
                return None
            self.stages = best.nodes_per_replica
        return self._restart(view, "nothing", 0.0, STARTUP)

    def _restart(
        self, view: View, loses: str, before_s: float, label: str = RECOVERY
    ) -> Transition | None:
        self._healing, self._ready_at = (), inf
        point = self._point(len(view.nodes) // self._depth())
        if point is None:
            return None if loses != SAVE else Transition(None, loses=SAVE, reason="no group left")
        costs = self.cost.costs
        pause = before_s + restart_s(costs, point.nodes, point.replicas)
        used = tuple(view.nodes)[: point.nodes]
        reason = "no group left" if loses == SAVE else "start"
        read = {DISK: point.replicas * costs.state_bytes}
        return Transition(point, ((label, pause),), loses, used=used, read=read, reason=reason)

    def _grow(self, view: View) -> Transition | None:
        """Groups that have healed join."""
        assert view.point is not None
        if self._healing and set(self._healing) <= set(view.used):
            self._healing, self._ready_at = (), inf
        if not self._healing:
            self._plan_growth(view)
            return None
        if view.now < self._ready_at - 1e-6 or view.pause_left > 0:
            return None
        used = (*view.used, *self._healing)
        point = self.cost.shaped(len(used) // self._depth(), self._depth())
        if point is None:
            return None
        pause = regroup_s(self.cost.costs)
        return Transition(point, ((RECOVERY, pause),), used=used, reason="group healed")

    def _plan_growth(self, view: View) -> None:
        depth, costs = self._depth(), self.cost.costs
        idle = idle_nodes(view)
        groups = len(view.used) // depth
        more = self._point(groups + len(idle) // depth)
        if view.point is None or more is None or more.tokens_per_s <= view.point.tokens_per_s:
            return
        self._healing = tuple(idle[: (more.replicas - groups) * depth])
        self._ready_at = view.now + costs.peer_s(depth)

    def _next_review(self, view: View, transition: Transition | None) -> float:
        """Groups of nodes that have no work begin to heal after the next change. One that joins at
        the end of the step is looked at after it."""
        if transition is not None and transition.point is not None:
            return transition.point.step_s + sum(seconds for _, seconds in transition.pauses)
        if self._healing:
            return max(1.0, self._ready_at - view.now, view.pause_left)
        return inf
