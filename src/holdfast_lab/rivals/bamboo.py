"""Bamboo's redundancy: each stage also computes its successor's layers, and stands in for it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from math import inf

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
from holdfast_lab.rivals.grid_cost import (
    FORWARD_SHARE,
    RECOVERY,
    STARTUP,
    GridModel,
    YoungPolicy,
    regroup_s,
    restart_s,
)

STAGES = 8  # `num_stages_target` for BERT and GPT-2 (uclasystem/bamboo, simulation/simulator.py)
STAND_IN_SLOWDOWN = 1.5
"""`fallback_slowdown`: factor on the step while a node does the work of two stages."""
RENDEZVOUS_S = 20.0  # `local_rendezvous_timeout_delta`: a planned reconfiguration after a step
GLOBAL_RENDEZVOUS_S = 30.0  # `global_rendezvous_timeout_delta`: after a fatal failure
RISK = 0.05  # it reconfigures when the share of nodes whose loss would be fatal is above this


@dataclass
class BambooPolicy(YoungPolicy):
    """Pipelines of fixed depth with redundant computation (Thorpe et al., NSDI 2023).

    A node whose predecessor lives is replaced by it in the running step: nothing is lost. Two
    neighbours, or a node that stands in already, are a fatal failure: back to the checkpoint. The
    rules of reconfiguration are those of the authors' simulator (`simulate_should_reconfigure`).

    Every step pays for the redundant forward pass: a third of a stage's operations, less the
    pipeline's bubble, which hides that much. (The paper reports 19.8 % for BERT; this gives 19 %
    for its three pipelines of eight stages.)

    stages: of every pipeline. overhead: of a step; None: by the rule above.
    """

    cost: GridModel
    stages: int = STAGES
    overhead: float | None = None
    name: str = "bamboo"
    _doubled: set[int] = field(default_factory=set)  # places that stand in for their successor
    _names: dict[int, str] = field(default_factory=dict)  # place -> node that does its work

    def decide(self, view: View, change: Change) -> Decision:
        if change.lost:
            transition: Transition | None = self._lose(view, {view.used[p] for p in change.lost})
        elif view.point is None:
            transition = self._begin(view, NOTHING, 0.0)
        elif view.pause_left > 0 or not change.review or self._is_forming(view):
            transition = None
        elif (transition := self._reconfigure(view)) is None:
            return STAY  # the answer is the same until nodes change
        return Decision(transition, self._review(view, transition))

    def _review(self, view: View, transition: Transition | None) -> float:
        """After each step it looks whether to reconfigure: so once a step after each change."""
        if transition is not None and transition.point is not None:
            return sum(s for _, s in transition.pauses) + transition.point.step_s
        if view.point is not None and (view.nodes.keys() - set(view.used) or self._doubled):
            return view.pause_left + view.point.step_s
        return inf

    def _is_forming(self, view: View) -> bool:
        """New pipelines are decided and begin at the end of the step."""
        return set(self._names.values()) != set(view.used)

    # --- layouts --------------------------------------------------------------------------------
    def _point(self, pipelines: int, slow: float = 1.0) -> OperatingPoint | None:
        for dp in range(pipelines, 0, -1):
            plain = self.cost.shaped(dp, self.stages)
            if plain is not None:
                factor = slow * (1 + self._redundant(dp))
                return replace(
                    plain,
                    layout=f"{plain.layout}{' stands in' if slow > 1 else ''}",
                    tokens_per_s=plain.tokens_per_s / factor,
                    step_s=plain.step_s * factor,
                )
        return None

    def _redundant(self, dp: int) -> float:
        if self.overhead is not None:
            return self.overhead
        return max(0.0, FORWARD_SHARE - self.cost.idle_share(dp, self.stages))

    def _begin(self, view: View, loses: str, before_s: float) -> Transition | None:
        """All processes meet again, from the checkpoint."""
        point = self._point(len(view.nodes) // self.stages)
        self._doubled = set()
        if point is None:
            self._names = {}
            return Transition(None, loses=loses, reason="too few nodes") if before_s else None
        costs = self.cost.costs
        self._names = dict(enumerate(list(view.nodes)[: point.nodes]))
        pause = before_s + restart_s(costs, point.nodes, point.replicas)
        label, reason = (RECOVERY, "fatal failure") if before_s else (STARTUP, "start")
        return Transition(
            point,
            ((label, pause),),
            loses,
            used=tuple(self._names.values()),
            read={DISK: point.replicas * costs.state_bytes},
            reason=reason,
        )

    # --- losses ---------------------------------------------------------------------------------
    def _lose(self, view: View, gone: Collection[str]) -> Transition | None:
        costs = self.cost.costs
        if self._is_forming(view):
            # A loss while new pipelines form: they form with the rest.
            self._doubled = set()
            point = self._point(len(view.nodes) // self.stages)
            if point is None:
                self._names = {}
                return Transition(None, loses=SAVE, reason="too few nodes")
            self._names = dict(enumerate(list(view.nodes)[: point.nodes]))
            costs = self.cost.costs
            pause = costs.detection_s + RENDEZVOUS_S + regroup_s(costs, 1 / self.stages)
            return Transition(
                point, ((RECOVERY, pause),), STEP, used=tuple(self._names.values()), reason="forms"
            )
        if self._is_fatal(gone):
            self._saves.saw_failure()
            # the rendezvous replaces the time for processes and membership
            wait = costs.detection_s + GLOBAL_RENDEZVOUS_S - costs.start_s - costs.regroup_s
            return self._begin(view, SAVE, max(1e-9, wait))
        pipelines = len(self._names) // self.stages
        point = self._point(pipelines, STAND_IN_SLOWDOWN)
        assert point is not None
        used = tuple(dict.fromkeys(self._names.values()))
        pause = max(costs.detection_s + regroup_s(costs), view.pause_left)
        at_work = replace(point, nodes=len(used))
        return Transition(
            at_work, ((RECOVERY, pause),), NOTHING, used=used, reason="neighbour stands in"
        )

    def _is_fatal(self, gone: Collection[str]) -> bool:
        """Whether a lost stage has no node that can stand in. If all have, it notes them."""
        lost = [place for place, name in self._names.items() if name in gone]
        for place in lost:
            stage = place % self.stages
            before = place - stage + (stage - 1) % self.stages
            if self._names[before] in gone or before in self._doubled or place in self._doubled:
                return True
            if self._names[before] == self._names[place]:
                return True
        for place in lost:
            stage = place % self.stages
            before = place - stage + (stage - 1) % self.stages
            self._names[place] = self._names[before]
            self._doubled.add(before)
        return False

    # --- between steps --------------------------------------------------------------------------
    def _reconfigure(self, view: View) -> Transition | None:
        working = set(self._names.values())
        waiting = [name for name in view.nodes if name not in working]
        doubled, places = len(self._doubled), len(self._names)
        active = places - doubled
        can_balance = 0 < doubled <= len(waiting)
        is_risky = doubled > 0 and 2 * doubled / active > RISK
        pipelines = places // self.stages
        more = self._point((active + len(waiting)) // self.stages)
        can_grow = more is not None and more.replicas > pipelines
        if not (can_balance or is_risky or can_grow):
            return None
        if more is None:
            self._names, self._doubled = {}, set()
            return Transition(None, loses=NOTHING, reason="too few nodes")
        kept = [name for name in dict.fromkeys(self._names.values()) if name in view.nodes]
        names = (kept + waiting)[: more.nodes]
        self._names, self._doubled = dict(enumerate(names)), set()
        costs = self.cost.costs
        moved = costs.state_bytes / self.stages / costs.peer_bandwidth
        pause = RENDEZVOUS_S + costs.communicator_s + moved
        return Transition(
            more, ((RECOVERY, pause),), NOTHING, used=tuple(names), reason="reconfigures"
        )
