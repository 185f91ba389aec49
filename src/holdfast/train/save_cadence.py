"""When rank 0 wishes for a save, and into which tiers: at the run file's cadence, or the best one.

`policy/saving/tiers.py` says what is best. Its inputs are gathered here at no cost: one look at
the clock a step, from one vote to the next. The cost of a save is the extra time of the steps
around it. The agent hands over how often the run breaks, what breaks and how long each tier takes;
that is continued here. Only rank 0 asks; its wish travels with the vote.

A tier's clock restarts when a save into it has really begun: one that found no room stays due.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from statistics import median

from holdfast.config.checkpoint import CheckpointConfig
from holdfast.policy.saving.failure_classes import Classes
from holdfast.policy.saving.failure_rate import Hazard
from holdfast.policy.saving.interval import Decision
from holdfast.policy.saving.tiers import (
    BUCKET,
    DISK,
    MEMORY,
    PEERS,
    Costs,
    Tiers,
    decide_all,
    due_now,
)

_STEPS = 15  # steps over which the usual step is taken
_LOOK = 0.05
"""Seconds between two decisions at least: each takes a tenth of a millisecond."""


@dataclass(frozen=True)
class Known:
    """What the agent knows. durations: by tier, seconds until a save is done."""

    hazard: Hazard | None = None
    classes: Classes = field(default_factory=Classes)
    durations: Mapping[int, float] = field(default_factory=dict)


class Cadence:
    """The cadence of every tier, as of the last `tick`. Belongs to the training thread."""

    def __init__(self, rules: CheckpointConfig, known: Known, nodes: int, now: float):
        """known: from before; nodes: at risk in this generation."""
        self._rules, self._nodes = rules, nodes
        self.tiers = Tiers.of(rules)
        self._hazard = known.hazard or Hazard.prior(rules.node_mtbf_hours * 3600)
        self._classes = known.classes
        self._costs = Costs()
        self._decisions: dict[int, Decision] = {}
        self._steps: list[float] = []
        self._ticked: float | None = None
        self._looked = now
        self._made_at = dict.fromkeys((MEMORY, PEERS, DISK, BUCKET), now)
        self._saved: int | None = None  # the highest tier of the save since the last tick

    def seconds(self, tier: int) -> float:
        """Seconds between saves into a tier; 0: nothing is saved into it by the clock."""
        if tier in self._decisions:
            found = self._decisions[tier].seconds
            return 0.0 if found == inf else found
        return self._by_clock().get(tier, 0.0)

    def _by_clock(self) -> dict[int, float]:
        """The run file's rules that count seconds."""
        bucket = self._rules.bucket_every_seconds
        found = {DISK: self._rules.every_seconds if DISK not in self.tiers.auto else 0.0}
        return found | ({} if bucket == "auto" else {BUCKET: float(bucket)})

    def tick(
        self, now: float, blocked: float, usual: bool, durations: Mapping[int, float] | None = None
    ) -> list[Decision]:
        """A step has come to its vote. The decisions that are new.

        blocked: seconds that training stood still for a save since the vote before, if there was
        one. usual: nothing else (a validation) fell into that time. durations: see `Known`.
        """
        step = None if self._ticked is None else now - self._ticked
        self._ticked = now
        saved, self._saved = self._saved, None
        if step is not None and usual:
            self._steps = [*self._steps, step][-_STEPS:]
            self._costs = self._costs.after(step, None if saved is None else (saved, blocked))
        if not self.tiers.auto or (self._decisions and now - self._looked < _LOOK):
            return []
        self._hazard = self._hazard.after(max(0.0, now - self._looked), self._nodes)
        self._looked = now
        before = self._decisions
        self._decisions = decide_all(
            self.tiers, self._costs, durations or {}, self._hazard, self._classes, self._nodes,
            self._fixed(), before,
        )  # fmt: skip
        return [d for tier, d in self._decisions.items() if d is not before.get(tier)]

    def _fixed(self) -> dict[int, float]:
        """Seconds between saves where the run file counts steps, by the usual step."""
        step = median(self._steps) if self._steps else 0.0
        memory, peers = self._rules.memory_every_steps, self._rules.peer_every_steps
        found = {
            MEMORY: step * memory if memory != "auto" else 0.0,
            PEERS: step * peers if peers != "auto" else 0.0,
            DISK: step * self._rules.by_steps,
        }
        return found | {tier: every for tier, every in self._by_clock().items() if every}

    def due(self, now: float, made: Iterable[int] = ()) -> frozenset[int]:
        """The tiers to save into now; made: those that are saved into at this step anyway."""
        every = {tier: self.seconds(tier) for tier in self.tiers.present}
        elapsed = {tier: now - at for tier, at in self._made_at.items()}
        return due_now(self.tiers, every, elapsed, frozenset(made))

    def made(self, now: float, tiers: Collection[int]) -> None:
        """A save into these tiers has begun."""
        for tier in tiers:
            self._made_at[tier] = now
        self._saved = max(tiers, default=None)
