"""Varuna's morphing: another grid for the machines that are left, by save, kill and relaunch."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from holdfast.policy.saving.tiers import DISK
from holdfast_lab.engine.interfaces import (
    NOTHING,
    SAVE,
    STEP,
    Change,
    Decision,
    OperatingPoint,
    Transition,
    View,
)
from holdfast_lab.rivals.grid_cost import RECOVERY, STARTUP, YoungPolicy, restart_s

WAIT_S = 120.0
"""`time.sleep(120)` before the job is killed and relaunched: "wait for transient errors to pass"
(microsoft/varuna, morph_server.py)."""
BEFORE_PREEMPTION_S = 30.0
"""A notice: the save begins so long before the machine goes (morph_server.py)."""


@dataclass
class VarunaPolicy(YoungPolicy):
    """The manager picks the fastest pipeline depth and width for the machines, the batch held.

    A morph saves, kills all processes and relaunches them (Athlur et al., EuroSys 2022, section 4).
    After a loss without a notice the job resumes from its last checkpoint, after the wait of the
    code. Varuna searches depths with its own simulator; here it is given the cost model's answer.
    """

    wait_s: float = WAIT_S
    name: str = "varuna"
    _save_at: float = inf

    def decide(self, view: View, change: Change) -> Decision:
        if change.noticed:
            leaves = min(view.nodes[name].leaves_s for name in change.noticed)
            self._save_at = min(self._save_at, max(view.now, leaves - BEFORE_PREEMPTION_S))
        staying = [n for n, node in view.nodes.items() if node.leaves_s == inf]
        if change.lost:
            transition: Transition | None = self._lose(view)
        elif view.now >= self._save_at:
            self._save_at = inf
            transition = self._morph(view, self.cost.point(len(staying)), self.wait_s, staying)
        else:
            transition = self._grow(view, staying)
        return Decision(transition, max(0.0, self._save_at - view.now))

    def _lose(self, view: View) -> Transition:
        self._saves.saw_failure()
        costs, best = self.cost.costs, self.cost.point(len(view.nodes))
        if best is None:
            return Transition(None, loses=SAVE, reason="too few nodes")
        pause = costs.detection_s + self.wait_s + restart_s(costs, best.nodes, best.replicas)
        read = {DISK: best.replicas * costs.state_bytes}
        return Transition(best, ((RECOVERY, pause),), SAVE, read=read, reason="morph after a loss")

    def _grow(self, view: View, staying: list[str]) -> Transition | None:
        best = self.cost.point(len(staying))
        if best is None or best == view.point:
            return None
        costs = self.cost.costs
        start = restart_s(costs, best.nodes, best.replicas)
        if view.point is None:
            return Transition(best, ((STARTUP, start),), reason="start")
        if best.tokens_per_s <= view.point.tokens_per_s:
            return None
        if view.pause_left > 0:
            pause = max(start, view.pause_left)
            return Transition(best, ((RECOVERY, pause),), NOTHING, reason="morph to grow")
        return self._morph(view, best, 0.0, staying)

    def _morph(
        self, view: View, best: OperatingPoint | None, wait_s: float, nodes: list[str]
    ) -> Transition:
        costs = self.cost.costs
        saved = costs.store_s(view.point.nodes) if view.point and not view.pause_left else 0.0
        if best is None:
            return Transition(None, loses=STEP, reason="too few nodes")
        pause = saved + wait_s + restart_s(costs, best.nodes, best.replicas)
        return Transition(
            best, ((RECOVERY, pause),), STEP, used=tuple(nodes[: best.nodes]), reason="morph"
        )
