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
    Decision,
    OperatingPoint,
    Transition,
    View,
)
from holdfast_lab.rivals.grid_cost import RECOVERY, STARTUP, YoungPolicy, restart_s


@dataclass
class RestartPolicy(YoungPolicy):
    """Any loss ends all processes; they start again on what is left and load the last checkpoint.

    torchelastic does so for every change of the membership (PyTorch, `torch.distributed.elastic`:
    "all workers are stopped and restarted"). Kinder than it: the run restarts for new nodes only if
    a larger layout is faster, and saves before that.
    """

    name: str = field(default="restart", kw_only=True)

    @property
    def tiers(self) -> tuple[int, ...]:
        """Tiers whose saves survive a loss; the first one is read."""
        return (DISK,)

    def start_s(self, point: OperatingPoint) -> float:
        """Seconds until processes train, the load of a save included."""
        return restart_s(self.cost.costs, point.nodes, point.replicas)

    def save_s(self, point: OperatingPoint) -> float:
        """Seconds until a save survives the end of all processes."""
        return self.cost.costs.store_s(point.nodes)

    def decide(self, view: View, change: Change) -> Decision:
        costs, tiers = self.cost.costs, self.tiers
        best = self.cost.point(len(view.nodes))
        if change.lost:
            self._saves.saw_failure()
            if best is None:
                return Decision(Transition(None, (), SAVE, tiers, reason="too few nodes"))
            pauses = ((RECOVERY, costs.detection_s + self.start_s(best)),)
            read = {tiers[0]: best.replicas * costs.state_bytes}
            return Decision(Transition(best, pauses, SAVE, tiers, read=read, reason="restart"))
        if best is None or best == view.point:
            return STAY
        start = self.start_s(best)
        if view.point is None:
            return Decision(Transition(best, ((STARTUP, start),), reason="start"))
        if view.pause_left > 0:
            return Decision(Transition(best, ((RECOVERY, start),), NOTHING, reason="restart"))
        if best.tokens_per_s <= view.point.tokens_per_s:
            return STAY
        pause = self.save_s(view.point) + start
        return Decision(Transition(best, ((RECOVERY, pause),), STEP, reason="grow"))
