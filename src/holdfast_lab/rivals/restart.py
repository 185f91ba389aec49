"""Restart from the last checkpoint, with Young's interval: what launchers without elasticity do."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.policy.saving.tiers import DISK
from holdfast_lab.engine.interfaces import (
    NOTHING,
    SAVE,
    STAY,
    STEP,
    Change,
    CostModel,
    Decision,
    SavePlan,
    Transition,
    View,
    slowest,
)
from holdfast_lab.rivals.grid_cost import RECOVERY, STARTUP, YoungSaves, restart_s


@dataclass
class RestartPolicy:
    """Any loss ends all processes; they start again on what is left and load the last checkpoint.

    torchelastic does so for every change of the membership (PyTorch, `torch.distributed.elastic`:
    "all workers are stopped and restarted"). Kinder than it: the run restarts for new nodes only if
    a larger layout is faster, and saves before that.
    """

    cost: CostModel
    name: str = "restart"
    _saves: YoungSaves = field(default_factory=YoungSaves)

    def decide(self, view: View, change: Change) -> Decision:
        costs = self.cost.costs
        best = self.cost.point(len(view.nodes))
        if change.lost:
            self._saves.saw_failure()
            if best is None:
                return Decision(Transition(None, loses=SAVE, reason="too few nodes"))
            pause = costs.detection_s + restart_s(costs, best.nodes, best.replicas)
            return Decision(
                Transition(
                    best,
                    ((RECOVERY, pause),),
                    SAVE,
                    read={DISK: best.replicas * costs.state_bytes},
                    reason="restart",
                )
            )
        if best is None or best == view.point:
            return STAY
        if view.point is None:
            pause = restart_s(costs, best.nodes, best.replicas)
            return Decision(Transition(best, ((STARTUP, pause),), reason="start"))
        if view.pause_left > 0:
            pause = restart_s(costs, best.nodes, best.replicas)
            return Decision(Transition(best, ((RECOVERY, pause),), NOTHING, reason="restart"))
        if best.tokens_per_s <= view.point.tokens_per_s:
            return STAY
        pause = costs.store_s(view.point.nodes) + restart_s(costs, best.nodes, best.replicas)
        return Decision(Transition(best, ((RECOVERY, pause),), STEP, reason="grow"))

    def saves(self, view: View) -> SavePlan:
        return self._saves.plan(view, self.cost.costs)

    def slowdown(self, view: View) -> float:
        return slowest(view)
