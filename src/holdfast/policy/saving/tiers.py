"""All tiers of a run at once: which there are, what each costs, how often each is saved into. Pure.

A tier's cadence is the run file's or decided here (`auto`, `interval: adaptive`). What is known:

    costs      by tier, what a save into it costs training beside one into those below (SaveCost)
    durations  by tier, seconds until such a save is done and none is asked for before, and seconds
               of a restore from it (TierDurations)
    hazard     failures a second, whatever they take with them (Hazard)
    classes    how they are shared out: process, node, several nodes, run store (Classes)

`tier_choice.TierChoices` does the sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf

from holdfast.config.sections.checkpoint import CheckpointConfig
from holdfast.policy.saving.failure_classes import FailureClassCounts
from holdfast.policy.saving.failure_rate import FailureRate
from holdfast.policy.saving.interval import IntervalBounds, IntervalDecision, SaveCost, TierCost
from holdfast.policy.saving.tier_choice import TierChoices
from holdfast.policy.saving.tier_durations import TierDurations

MEMORY, PEERS, DISK, BUCKET = range(4)

PRIOR_SAVE_COST_S = {MEMORY: 0.02, PEERS: 0.02, DISK: 0.2, BUCKET: 0.2}
"""Seconds that a save is assumed to cost before the first one. Too little would make a short run
save all the time. Too much would leave it without a save, or exclude the peers for good. The first
save corrects it."""
REQUIRED_TIERS = (MEMORY, DISK)
"""Tiers that are never left out: peers and disk are fed from memory, and the bucket from the disk.
If a save passes through a lower tier anyway, saving more often into that one is never worse. The
root of 2 (C + c) (R + r) is at least the sum of the roots of 2 C R and 2 c r (Cauchy-Schwarz)."""
MIN_SNAPSHOT_INTERVAL_S = 1e-3
"""Seconds between snapshots at least; in fact a step."""


@dataclass(frozen=True)
class TierSettings:
    """The run file's settings for each tier of a run. automatic: those to be decided."""

    present: tuple[int, ...]
    automatic: frozenset[int]
    bounds: Mapping[int, IntervalBounds] = field(repr=False)

    @staticmethod
    def from_config(rules: CheckpointConfig) -> TierSettings:
        others = [peer for peer in rules.peers if peer.name != rules.machine.name]
        there = {
            MEMORY: rules.memory_every_steps != 0,
            PEERS: bool(others),
            DISK: True,
            BUCKET: bool(rules.bucket),
        }
        decided = {
            MEMORY: rules.memory_every_steps == "auto",
            PEERS: rules.peer_every_steps == "auto",
            DISK: rules.interval == "adaptive",
            BUCKET: rules.bucket_every_seconds == "auto",
        }
        snapshots = IntervalBounds(
            min(MIN_SNAPSHOT_INTERVAL_S, rules.max_seconds), rules.max_seconds
        )
        durable = IntervalBounds(rules.min_seconds, rules.max_seconds)
        return TierSettings(
            tuple(tier for tier, is_there in there.items() if is_there),
            frozenset(tier for tier, is_auto in decided.items() if is_auto and there[tier]),
            {MEMORY: snapshots, PEERS: snapshots, DISK: durable, BUCKET: durable},
        )


@dataclass(frozen=True)
class SaveCosts:
    """The measured cost of saves, by the highest tier that they went into."""

    by_tier: Mapping[int, SaveCost] = field(
        default_factory=lambda: {tier: SaveCost(prior) for tier, prior in PRIOR_SAVE_COST_S.items()}
    )

    def with_step(self, step: float, saved: tuple[int, float] | None = None) -> SaveCosts:
        """A step took `step` seconds. saved: the highest tier of the save in it, if there was one,
        and the seconds that training paused for it."""
        out = dict(self.by_tier)
        open_one = next((t for t, cost in out.items() if cost.pending is not None), None)
        if saved is None:
            for tier in out if open_one is None else (open_one,):
                out[tier] = out[tier].with_step(step)
            return replace(self, by_tier=out)
        highest, blocked = saved
        for tier, cost in self.by_tier.items():
            if tier == highest:
                out[tier] = cost.with_step(step, blocked)
            elif cost.pending is not None:
                out[tier] = cost.close_pending()
            elif tier > highest and open_one is None:
                # If every step is captured, a usual step of the disk is one with a snapshot.
                out[tier] = cost.with_step(step)
        return replace(self, by_tier=out)

    def cost_s(self, tier: int, lower: int | None) -> float:
        """Seconds of a save into `tier`. lower: the lowest tier, whose captures are made anyway."""
        cost = self.by_tier[tier]
        if lower is None or lower == tier:
            return cost.cost_s
        return cost.marginal_cost_s(self.by_tier[lower].mean_blocked_s)


def decide_intervals(
    tiers: TierSettings,
    costs: SaveCosts,
    durations: TierDurations,
    failure_rate: FailureRate,
    failure_classes: FailureClassCounts,
    nodes: float,
    fixed_intervals: Mapping[int, float],
    current: Mapping[int, IntervalDecision],
) -> dict[int, IntervalDecision]:
    """The present decision of every tier that is to be decided.

    fixed_intervals: seconds between saves into each tier that is present and the run file decides,
    0 where they are not known. current: the decisions in force, each of which stands as long as it
    is as good.
    """
    rates = failure_classes.rate_by_tier(failure_rate.failures_per_second(nodes), tiers.present)
    evidence = partial(failure_rate.evidence_on, nodes)
    choices = tier_choices(tiers, tier_costs(tiers, costs, durations), fixed_intervals)
    return {made.tier: made for made in choices.decide(rates, current, evidence)}


def tier_costs(
    tiers: TierSettings, costs: SaveCosts, durations: TierDurations
) -> tuple[TierCost, ...]:
    """What each tier of a run costs: its saves, the wait until they are durable, its restores."""
    lower = tiers.present[0] if tiers.present[0] != DISK else None
    return tuple(
        TierCost(
            tier,
            costs.cost_s(tier, lower),
            durations.save_s.get(tier, 0.0),
            durations.restore_s.get(tier, 0.0),
        )
        for tier in tiers.present
    )


def tier_choices(
    tiers: TierSettings, prices: Sequence[TierCost], fixed_intervals: Mapping[int, float]
) -> TierChoices:
    """The choices that a run has, for a caller that keeps them as long as prices stay.

    prices: of `tier_costs`. fixed_intervals: as of `decide_intervals`.
    """
    fixed = {t: fixed_intervals.get(t, 0.0) for t in tiers.present if t not in tiers.automatic}
    return TierChoices.among(prices, tiers.bounds, fixed, REQUIRED_TIERS)


def due_tiers(
    tiers: TierSettings,
    interval_s: Mapping[int, float],
    elapsed_s: Mapping[int, float],
    already_due: frozenset[int],
) -> frozenset[int]:
    """The tiers to save into at this step.

    interval_s: seconds between saves by tier, for those that go by the clock. elapsed_s: since the
    last one. already_due: tiers that are saved into at this step anyway, by a rule that counts
    steps. A tier joins a save of a lower one if that save is nearer to the tier's time than the
    next one would be. The bucket gets what the disk gets, and nothing is saved for the bucket
    alone.
    """
    due = set(already_due)
    for tier in tiers.present:
        if tier in due or not 0 < interval_s.get(tier, inf) < inf:
            continue
        if tier == BUCKET and DISK not in due:
            continue
        until_next = min((elapsed_s[lower] for lower in due if lower < tier), default=0.0)
        if elapsed_s[tier] + until_next / 2 >= interval_s[tier]:
            due.add(tier)
    return frozenset(due)
