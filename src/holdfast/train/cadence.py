"""When rank 0 wishes for a save by the clock: at the run file's interval, or at the best one.

`policy/interval.py` says what is best; here its inputs are gathered, at no cost: one look at the
clock a step, from one vote to the next. What a save costs is how much longer the steps around it
are; how often the run breaks was handed over by the agent (failures of older generations) and goes
on here with the time that passes without one. Only rank 0 asks; its wish travels with the vote.
"""

from __future__ import annotations

from holdfast.config.checkpoint import CheckpointConfig
from holdfast.policy.hazard import Hazard
from holdfast.policy.interval import Bounds, Decision, SaveCost, decide_now

DURABLE_TIER = 2  # what a restart begins from today: the run store


class Cadence:
    """The interval in seconds, as of the last `tick`. Belongs to the training thread."""

    def __init__(self, rules: CheckpointConfig, hazard: Hazard | None, nodes: int, now: float):
        """hazard: what is known from before; nodes: at risk in this generation."""
        self._rules, self._nodes = rules, nodes
        self._bounds = Bounds(rules.min_seconds, rules.max_seconds)
        self._hazard = hazard or Hazard.prior(rules.node_mtbf_hours * 3600)
        self._cost = SaveCost()
        self._decision: Decision | None = None
        self._ticked: float | None = None
        self._looked = now

    @property
    def seconds(self) -> float:
        """Seconds between saves; 0: nothing is saved by the clock."""
        if self._rules.interval == "fixed":
            return self._rules.every_seconds
        return self._decision.seconds if self._decision is not None else 0.0

    def tick(self, now: float, blocked: float | None, usual: bool) -> Decision | None:
        """A step has come to its vote. The decision, when it is a new one.

        blocked: seconds that training stood still for a save since the vote before; None: there
        was none. usual: nothing else (a validation) fell into that time.
        """
        if self._rules.interval == "fixed":
            return None
        self._hazard = self._hazard.after(max(0.0, now - self._looked), self._nodes)
        self._looked = now
        if self._ticked is not None and usual:
            self._cost = self._cost.after(now - self._ticked, blocked)
        self._ticked = now
        before = self._decision
        self._decision = decide_now(
            DURABLE_TIER, self._cost, self._hazard, self._nodes, self._bounds, before
        )
        return None if self._decision is before else self._decision
