"""When rank 0 wishes for a save, and into which tiers: at the run file's cadence, or the best one.

`policy/saving/tiers.py` says what is best. Its inputs are gathered here at no cost: one look at
the clock a step, from one vote to the next. The cost of a save is the extra time of the steps
around it. The agent hands over how often the run breaks, what breaks and how long each tier takes;
that is continued here. Only rank 0 asks; its wish travels with the vote.

A tier's clock restarts when a save into it has really begun: one that found no room stays due.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from math import inf
from statistics import median

from holdfast.config.sections.checkpoint import CheckpointConfig
from holdfast.policy.saving.failure_classes import FailureClassCounts
from holdfast.policy.saving.failure_rate import FailureRate
from holdfast.policy.saving.interval import IntervalDecision
from holdfast.policy.saving.tier_durations import TierDurations
from holdfast.policy.saving.tiers import (
    BUCKET,
    DISK,
    MEMORY,
    PEERS,
    SaveCosts,
    TierSettings,
    decide_intervals,
    due_tiers,
)

_USUAL_STEP_WINDOW = 15  # steps over which the usual step is taken
_DECISION_INTERVAL_S = 0.05
"""Seconds between two decisions at least: each takes a tenth of a millisecond."""


@dataclass(frozen=True)
class FailureStats:
    """What the agent knows of the run so far."""

    failure_rate: FailureRate | None = None
    failure_classes: FailureClassCounts = field(default_factory=FailureClassCounts)


class SaveCadence:
    """The cadence of every tier, as of the last `tick`. Belongs to the training thread."""

    def __init__(self, rules: CheckpointConfig, stats: FailureStats, nodes: int, now: float):
        """stats: from before; nodes: at risk in this generation."""
        self._rules, self._nodes = rules, nodes
        self.tiers = TierSettings.from_config(rules)
        self._failure_rate = stats.failure_rate or FailureRate.from_prior(
            rules.node_mtbf_hours * 3600
        )
        self._failure_classes = stats.failure_classes
        self._costs = SaveCosts()
        self._decisions: dict[int, IntervalDecision] = {}
        self._steps: list[float] = []
        self._last_tick: float | None = None
        self._decided_at = now
        self._saved_at = dict.fromkeys((MEMORY, PEERS, DISK, BUCKET), now)
        # the highest tier of the save since the last tick
        self._highest_saved_tier: int | None = None

    def interval_s(self, tier: int) -> float:
        """Seconds between saves into a tier; 0: nothing is saved into it by the clock."""
        if tier in self._decisions:
            found = self._decisions[tier].seconds
            return 0.0 if found == inf else found
        return self._clock_intervals().get(tier, 0.0)

    def _clock_intervals(self) -> dict[int, float]:
        """The run file's rules that count seconds."""
        bucket = self._rules.bucket_every_seconds
        found = {DISK: self._rules.every_seconds if DISK not in self.tiers.automatic else 0.0}
        return found | ({} if bucket == "auto" else {BUCKET: float(bucket)})

    def tick(
        self, now: float, blocked_s: float, is_usual: bool, durations: TierDurations | None = None
    ) -> list[IntervalDecision]:
        """A step has come to its vote. The decisions that are new.

        blocked_s: seconds that training stood still for a save since the vote before, if there was
        one. is_usual: nothing else (a validation) fell into that time. durations: of each tier.
        """
        step = None if self._last_tick is None else now - self._last_tick
        self._last_tick = now
        saved, self._highest_saved_tier = self._highest_saved_tier, None
        if step is not None and is_usual:
            self._steps = [*self._steps, step][-_USUAL_STEP_WINDOW:]
            self._costs = self._costs.with_step(step, None if saved is None else (saved, blocked_s))
        if not self.tiers.automatic or (
            self._decisions and now - self._decided_at < _DECISION_INTERVAL_S
        ):
            return []
        self._failure_rate = self._failure_rate.with_observation(
            max(0.0, now - self._decided_at), self._nodes
        )
        self._decided_at = now
        before = self._decisions
        self._decisions = decide_intervals(
            self.tiers,
            self._costs,
            durations or TierDurations(),
            self._failure_rate,
            self._failure_classes,
            self._nodes,
            self._fixed_intervals(),
            before,
        )
        return [d for tier, d in self._decisions.items() if d is not before.get(tier)]

    def _fixed_intervals(self) -> dict[int, float]:
        """Seconds between saves where the run file counts steps, by the usual step."""
        step = median(self._steps) if self._steps else 0.0
        memory, peers = self._rules.memory_every_steps, self._rules.peer_every_steps
        found = {
            MEMORY: step * memory if memory != "auto" else 0.0,
            PEERS: step * peers if peers != "auto" else 0.0,
            DISK: step * self._rules.by_steps,
        }
        return found | {tier: every for tier, every in self._clock_intervals().items() if every}

    def due_tiers(self, now: float, already_due: Iterable[int] = ()) -> frozenset[int]:
        """The tiers to save into now; already_due: those that are saved into at this step
        anyway."""
        every = {tier: self.interval_s(tier) for tier in self.tiers.present}
        elapsed = {tier: now - at for tier, at in self._saved_at.items()}
        return due_tiers(self.tiers, every, elapsed, frozenset(already_due))

    def record_save(self, now: float, tiers: Collection[int]) -> None:
        """A save into these tiers has begun."""
        for tier in tiers:
            self._saved_at[tier] = now
        self._highest_saved_tier = max(tiers, default=None)
