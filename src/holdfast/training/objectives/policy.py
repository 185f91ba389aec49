"""Policy gradients of generated rows: GRPO and its kin, RLOO, and PPO with a value head.

Names, formulas and metrics are those of TRL 1.16 (`GRPOTrainer`, `RLOOTrainer`); PPO's are those of
verl 0.9. A row is a completion. Side tensors that the feed gives:

    old             log-probability of each target under the policy that generated the row
    advantages      grpo, rloo: of the row (`core/data/advantages.py`)
    score           ppo: the reward of the row
    old_values      ppo: values of the policy that generated the row, with whiten_advantages
    reference       log-probability under the reference, with beta above 0
    reward, ...     what `REPORTED` lists, for metrics alone; a value of the row at each target

Each loss is a sum over rows or tokens, which the step divides by the weight of all microbatches. So
neither microbatches nor replicas change it. TRL divides by the rows of a microbatch, so it agrees
where a step is one microbatch, or all have equal weights. `bnpo` is `dapo` here: the
tokens of the step divide both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.config.sections.objective import ObjectiveConfig
from holdfast.core.data.advantages import SOURCE
from holdfast.training.objectives.protocol import Combine, Loss, Side
from holdfast.training.objectives.rows import IGNORED_TARGET, Rows, count_rows

REPORTED = ("reward", "reward_std", "frac_reward_zero_std", "completions/clipped_ratio")
"""Side tensors that are only averaged over rows, under their names in TRL."""
MEAN, SCALE = "advantage_mean", "advantage_scale"
"""Side tensors of whitened advantages: what is subtracted, and what they are multiplied by."""
WHITE_EPSILON = 1e-8
"""Added to a variance of advantages, as in verl."""
_CLIPS = ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean")
OF_ROWS = (*REPORTED, "completions/mean_length")
"""The names of `row_means`."""
_COMMON = (*OF_ROWS, "entropy", *_CLIPS)


# --- advantages of tokens -------------------------------------------------------------------
def estimate_advantages(
    rewards: Tensor, values: Tensor, rows: Rows, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns of each target, by generalised advantage estimation.

    rewards, values: [B, S] float64, of each target. What is no target is skipped; a row
    ends where its document does. Both results are 0 there."""
    counted = rows.targets != IGNORED_TARGET
    following, carried = torch.zeros_like(values[:, 0]), torch.zeros_like(values[:, 0])
    documents, found = rows.documents, torch.zeros_like(values)
    last = values.shape[1] - 1
    for at in range(last, -1, -1):
        if at < last:
            same = documents[:, at] == documents[:, at + 1]
            following, carried = following * same, carried * same
        delta = rewards[:, at] + gamma * following - values[:, at]
        here = counted[:, at]
        carried = torch.where(here, delta + gamma * lam * carried, carried)
        following = torch.where(here, values[:, at], following)
        found[:, at] = carried
    found = found.masked_fill(~counted, 0.0)
    return found, (found + values).masked_fill(~counted, 0.0)


def _advantages_of(config: ObjectiveConfig, rows: Rows, side: Side) -> tuple[Tensor, Tensor]:
    """Return PPO's advantages and returns from score, old, reference and old_values."""
    rewards = side["score"].double() * _last_target(rows)
    if beta := config.number("beta"):
        gap = side["old"].double() - side["reference"].double()
        rewards = rewards - beta * gap.masked_fill(rows.targets == IGNORED_TARGET, 0.0)
    before = side["old_values"].double()
    numbers = config.number("gamma"), config.number("lam")
    return estimate_advantages(rewards.detach(), before, rows, *numbers)


def moments_of_advantages(
    config: ObjectiveConfig, side: Mapping[str, NDArray[Any]], counts: Sequence[int]
) -> dict[str, float]:
    """Return what whitens the advantages of a step's tokens, as verl's `masked_whiten` does.

    Args:
        side: score, old, old_values and, with beta, reference of all rows: [rows, longest].
        counts: targets of each row, which come first.
    """
    tensors = {name: torch.from_numpy(values) for name, values in side.items()}
    at = torch.arange(tensors["score"].shape[1])
    counted = at < torch.tensor(counts)[:, None]
    rows = Rows.of(torch.where(counted, 1, IGNORED_TARGET), (~counted).int())
    taken = _advantages_of(config, rows, tensors)[0][counted]
    if len(taken) < 2:
        return {MEAN: 0.0, SCALE: 1.0}
    return {MEAN: float(taken.mean()), SCALE: float(torch.rsqrt(taken.var() + WHITE_EPSILON))}


# --- losses ------------------------------------------------------------------------------------
class PolicyLoss:
    """What the losses share: ratios, clipping and metrics. config: the section `objective`."""

    names: tuple[str, ...] = _COMMON
    needs: Set[str] = frozenset({"old", "advantages"})
    needs_entropy = True

    def __init__(self, config: ObjectiveConfig, combine: Combine | None = None) -> None:
        self._config, self._beta = config, config.number("beta")
        self._rewards, self._sources = tuple[str, ...](), tuple[str, ...]()
        self._entropy = config.number("entropy_coef")
        self.trains_entropy = self._entropy > 0
        low = config.number("epsilon")
        high = config.number("epsilon_high") or low
        self._bounds = 1 - low, 1 + high
        if self._beta:
            self.needs = {*self.needs, "reference"}

    def report(self, rewards: Sequence[str], sources: Sequence[str]) -> None:
        """Add up rewards one by one, and the sum of rewards by source. rewards: side tensors.
        sources: by the numbers in the side tensor `source`."""
        self._rewards, self._sources = tuple(rewards), tuple(sources)
        self.names = (*self.names, *rewards, *(f"reward/{source}" for source in sources))

    def weigh(
        self,
        targets: NDArray[np.int64],
        documents: NDArray[np.int32],
        side: Mapping[str, NDArray[Any]],
    ) -> int:
        return int((count_rows(targets, documents) > 0).sum())

    def _clipped(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        """The pessimistic one of the plain and the clipped objective, as a loss."""
        plain, clipped = ratio * advantages, ratio.clamp(*self._bounds) * advantages
        return -torch.minimum(plain, clipped)

    def _clips(self, ratio: Tensor, advantages: Tensor, which: Tensor) -> dict[str, Any]:
        low = (ratio < self._bounds[0]) & (advantages < 0)
        high = (ratio > self._bounds[1]) & (advantages > 0)
        shares = (_mean(one.double(), which) for one in (low, high, low | high))
        return dict(zip(_CLIPS, shares, strict=True))

    def _sums(self, rows: Rows, side: Side) -> dict[str, tuple[Tensor, Tensor]]:
        """Metrics that need no ratio."""
        counted = rows.targets != IGNORED_TARGET
        sums = row_means(rows, side, self._rewards)
        if self._sources and SOURCE in side:
            reward, of_source = rows.value(side["reward"]), rows.value(side[SOURCE])
            for number, source in enumerate(self._sources):
                which = rows.present & (of_source == number)
                sums[f"reward/{source}"] = _mean(reward, which)
        if "entropies" in side:
            sums["entropy"] = _mean(side["entropies"].double(), counted)
        nothing = rows.counts.new_zeros(()), rows.counts.new_zeros(())
        return dict.fromkeys(self.names, nothing) | sums


class Grpo(PolicyLoss):
    """Group relative policy optimisation (Shao et al. 2024), with the divisors of BNPO, Dr. GRPO
    (Liu et al. 2025) and DAPO (Yu et al. 2025), and the ratios of GSPO (Zheng et al. 2025)."""

    names: tuple[str, ...] = (*_COMMON, "kl")

    def __call__(self, logps: Tensor, targets: Tensor, documents: Tensor, side: Side) -> Loss:
        rows, config = Rows.of(targets, documents), self._config
        counted = targets != IGNORED_TARGET
        logps, advantages = logps.double(), side["advantages"].double()
        log_ratio = (logps - side["old"].double()).masked_fill(~counted, 0.0)
        of_rows = config.text("importance_sampling_level") == "sequence"
        if of_rows:
            log_ratio = _spread(rows.sum(log_ratio) / rows.counts.clamp_min(1), rows)
        ratio = log_ratio.exp()
        losses = self._clipped(ratio, advantages)
        sums = self._sums(rows, side)
        if self._beta:
            gap = (side["reference"].double() - logps).masked_fill(~counted, 0.0)
            kl = gap.exp() - gap - 1
            losses = losses + self._beta * kl
            sums["kl"] = _mean(kl.detach(), counted)
        if self._entropy:
            losses = losses - self._entropy * side["entropies"].double()
        which = _last_target(rows) if of_rows else counted
        sums |= self._clips(ratio.detach(), advantages, which)
        losses = losses.masked_fill(~counted, 0.0)
        kind = config.text("loss_type")
        if kind == "grpo":
            losses = rows.sum(losses) / rows.counts.clamp_min(1)
        elif kind == "dr_grpo":
            losses = losses / config.number("max_completion_length")
        return Loss(losses.sum(), sums)

    def weigh(
        self,
        targets: NDArray[np.int64],
        documents: NDArray[np.int32],
        side: Mapping[str, NDArray[Any]],
    ) -> int:
        if self._config.text("loss_type") in ("bnpo", "dapo"):
            return int((targets != IGNORED_TARGET).sum())
        return super().weigh(targets, documents, side)


class Rloo(PolicyLoss):
    """REINFORCE leave-one-out (Ahmadian et al. 2024): ratios of complete rows. A KL term is a part
    of the rewards, so `beta` acts in the advantages."""

    names: tuple[str, ...] = (*_COMMON, "kl")

    def __call__(self, logps: Tensor, targets: Tensor, documents: Tensor, side: Side) -> Loss:
        rows = Rows.of(targets, documents)
        advantages = rows.value(side["advantages"])
        ratio = rows.sum(logps.double() - side["old"].double()).exp()
        losses = self._clipped(ratio, advantages)
        if self._entropy:
            bonus = rows.sum(side["entropies"]) / rows.counts.clamp_min(1)
            losses = losses - self._entropy * bonus
        losses = losses.masked_fill(~rows.present, 0.0)
        sums = self._sums(rows, side)
        sums |= self._clips(ratio.detach(), advantages, rows.present)
        if self._beta:
            gap = side["old"].double() - side["reference"].double()
            sums["kl"] = _mean(gap, targets != IGNORED_TARGET)
        return Loss(losses.sum(), sums)


class Ppo(PolicyLoss):
    """Proximal policy optimisation (Schulman et al. 2017) with values of each token.

    The reward of a token is -beta times its log ratio to the reference, and at a row's last token
    its score is added. Values before the step are those of the present weights, unless the feed
    gives older ones (`old_values`). Only then does `cliprange_value` act. Whitening needs all
    tokens of a step, so the feed gives older values, and what `moments_of_advantages` returns."""

    names: tuple[str, ...] = (*_COMMON, "kl", "value_loss", "value_clip_ratio")
    needs: Set[str] = frozenset({"old", "score", "values"})

    def __init__(self, config: ObjectiveConfig, combine: Combine | None = None) -> None:
        super().__init__(config, combine)
        self._whitens = config.of_steps
        if self._whitens:
            self.needs = {*self.needs, "old_values", MEAN, SCALE}

    def __call__(self, logps: Tensor, targets: Tensor, documents: Tensor, side: Side) -> Loss:
        rows, config = Rows.of(targets, documents), self._config
        counted = targets != IGNORED_TARGET
        logps, old = logps.double(), side["old"].double()
        values = side["values"].double()
        before = side.get("old_values", values).detach().double()
        sums = self._sums(rows, side)
        if self._beta:
            gap = (old - side["reference"].double()).masked_fill(~counted, 0.0)
            sums["kl"] = _mean(gap, counted)
        advantages, returns = _advantages_of(config, rows, {**side, "old_values": before})
        if self._whitens:
            advantages = (advantages - side[MEAN].double()) * side[SCALE].double()
        ratio = (logps - old).masked_fill(~counted, 0.0).exp()
        losses = self._clipped(ratio, advantages)
        if self._entropy:
            losses = losses - self._entropy * side["entropies"].double()
        reach = config.number("cliprange_value")
        near = torch.minimum(torch.maximum(values, before - reach), before + reach)
        plain, clipped = (values - returns) ** 2, (near - returns) ** 2
        of_values = 0.5 * torch.maximum(plain, clipped)
        sums |= self._clips(ratio.detach(), advantages, counted)
        sums["value_loss"] = _mean(of_values.detach(), counted)
        sums["value_clip_ratio"] = _mean((clipped > plain).double(), counted)
        losses = losses + config.number("vf_coef") * of_values
        return Loss(losses.masked_fill(~counted, 0.0).sum(), sums)

    def weigh(
        self,
        targets: NDArray[np.int64],
        documents: NDArray[np.int32],
        side: Mapping[str, NDArray[Any]],
    ) -> int:
        return int((targets != IGNORED_TARGET).sum())


def row_means(
    rows: Rows, side: Side, rewards: Sequence[str] = ()
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return sums and counts of what the feed says of each row, and of their lengths. rewards:
    side tensors with one reward each."""
    present, names = rows.present, [n for n in (*REPORTED, *rewards) if n in side]
    means = {name: _mean(rows.value(side[name]), present) for name in names}
    return means | {OF_ROWS[-1]: _mean(rows.counts, present)}


def _spread(of_rows: Tensor, rows: Rows) -> Tensor:
    """A value of each row at each of its tokens.  [B, N] -> [B, S]"""
    return of_rows.gather(1, rows.documents)


def _last_target(rows: Rows) -> Tensor:
    """Which target is the last one of its row.  -> [B, S] bool"""
    counted = rows.targets != IGNORED_TARGET
    at = torch.arange(counted.shape[1], device=counted.device).double().expand(counted.shape)
    return counted & (_spread(rows.value(at), rows) == at)


def _mean(values: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
    """Sum and count of the values that count."""
    return values.masked_fill(~which, 0.0).sum(), which.sum(dtype=torch.float64)
