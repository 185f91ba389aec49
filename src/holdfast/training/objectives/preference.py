"""Preference losses of pairs and of rated rows, as functions of each row's log-probabilities.

Each is a sum over pairs or rows in float64. The names and formulas are those of TRL 1.16. It takes
means over a batch, and the step divides by the number of pairs or rows of the step.
Differences from TRL:

- `dpo` with loss_type sigmoid uses `label_smoothing` as Mitchell (2023, "A note on DPO with noisy
  preferences") does. TRL ignores it there.
- `orpo` and `simpo` with `cpo_alpha` take the mean cross entropy of each chosen answer, and then
  the mean over pairs. TRL takes one mean over all tokens of a batch; in `orpo` the prompt counts.
- `kto` estimates its baseline from the KL rows of one microbatch. TRL's is that of all processes.
  So TRL's loss depends on their number, and this one does not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Set
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from holdfast.config.sections.objective import ObjectiveConfig
from holdfast.training.objectives.protocol import Combine, Loss, Side
from holdfast.training.objectives.rows import Rows, count_pairs, count_rows

_REWARDS = "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"
_LOGPS = "logps/chosen", "logps/rejected"

SideArrays = Mapping[str, NDArray[Any]]


def identity(summed: Tensor) -> Tensor:
    """A `Combine` of a microbatch that one rank has alone."""
    return summed


class PairLoss(ABC):
    """A loss of pairs. config: the section `objective`."""

    names: tuple[str, ...] = (*_REWARDS, *_LOGPS)
    needs: Set[str] = frozenset()
    needs_entropy = False
    trains_entropy = False

    def __init__(self, config: ObjectiveConfig, combine: Combine = identity) -> None:
        self._config = config

    def __call__(self, logps: Tensor, targets: Tensor, documents: Tensor, side: Side) -> Loss:
        rows = Rows.of(targets, documents)
        losses, sums = self.of_rows(rows, logps, side)
        present = rows.pairs
        count = present.sum(dtype=torch.float64)
        total = losses.masked_fill(~present, 0.0).sum()
        means = {
            name: (values.detach().masked_fill(~present, 0.0).sum(), count)
            for name, values in sums.items()
        }
        return Loss(total, means)

    def weigh(
        self, targets: NDArray[np.int64], documents: NDArray[np.int32], side: SideArrays
    ) -> int:
        return count_pairs(targets, documents)

    @abstractmethod
    def of_rows(self, rows: Rows, logps: Tensor, side: Side) -> tuple[Tensor, Mapping[str, Tensor]]:
        """-> the loss of each pair [B, N / 2], and the values of `names` [B, N / 2]"""


def _halves(rows: Tensor) -> tuple[Tensor, Tensor]:
    """[B, N] -> chosen and rejected [B, N / 2]"""
    return rows[:, 0::2], rows[:, 1::2]


def _safe(chosen: Tensor, rows: Rows) -> Tensor:
    """1 where there is no row, so that nothing divides by zero."""
    return torch.where(rows.present, chosen, torch.ones_like(chosen))


def _reported(chosen: Tensor, rejected: Tensor, logps: Tensor) -> dict[str, Tensor]:
    """The sums that all pairs have. chosen, rejected: rewards [B, N / 2]; logps: [B, N]."""
    values = chosen, rejected, chosen - rejected, (chosen > rejected).double(), *_halves(logps)
    return dict(zip((*_REWARDS, *_LOGPS), values, strict=True))


class Dpo(PairLoss):
    """Direct preference optimisation (Rafailov et al. 2023) and its variants."""

    needs: Set[str] = frozenset({"reference"})

    def of_rows(self, rows: Rows, logps: Tensor, side: Side) -> tuple[Tensor, Mapping[str, Tensor]]:
        policy = rows.sum(logps)
        ratios = policy - rows.sum(side["reference"])
        losses = self.losses(*_halves(ratios), *_halves(_safe(rows.counts, rows)))
        beta = self._config.number("beta")
        chosen, rejected = _halves(beta * ratios)
        return losses, _reported(chosen, rejected, policy)

    def losses(
        self, chosen: Tensor, rejected: Tensor, chosen_count: Tensor, rejected_count: Tensor
    ) -> Tensor:
        """chosen, rejected: log ratios to the reference; counts: targets of each row."""
        config = self._config
        kind, beta = config.text("loss_type"), config.number("beta")
        if kind == "sigmoid_norm":
            chosen, rejected = chosen / chosen_count, rejected / rejected_count
            return -F.logsigmoid(beta * (chosen - rejected))
        return _DPO[kind](config, beta, chosen, rejected)


def _smoothed(config: ObjectiveConfig, z: Tensor) -> Tensor:
    """-log sigmoid of z, mixed with that of -z."""
    smoothing = config.number("label_smoothing")
    return -(1 - smoothing) * F.logsigmoid(z) - smoothing * F.logsigmoid(-z)


def _robust(config: ObjectiveConfig, z: Tensor) -> Tensor:
    smoothing = config.number("label_smoothing")
    mixed = -(1 - smoothing) * F.logsigmoid(z) + smoothing * F.logsigmoid(-z)
    return mixed / (1 - 2 * smoothing)


def _exo_pair(config: ObjectiveConfig, z: Tensor) -> Tensor:
    right = z.new_tensor(config.number("label_smoothing"))
    first = torch.sigmoid(z) * (F.logsigmoid(z) - torch.log1p(-right))
    return first + torch.sigmoid(-z) * (F.logsigmoid(-z) - right.log())


def _discopop(config: ObjectiveConfig, z: Tensor) -> Tensor:
    share = torch.sigmoid(z / config.number("discopop_tau"))
    return -F.logsigmoid(z) * (1 - share) + torch.exp(-z) * share


_DpoLoss = Callable[[ObjectiveConfig, float, Tensor, Tensor], Tensor]
_DPO: dict[str, _DpoLoss] = {
    "sigmoid": lambda o, b, c, r: _smoothed(o, b * (c - r)),
    "hinge": lambda o, b, c, r: torch.relu(1 - b * (c - r)),
    "robust": lambda o, b, c, r: _robust(o, b * (c - r)),
    "exo_pair": lambda o, b, c, r: _exo_pair(o, b * (c - r)),
    "nca_pair": lambda o, b, c, r: (
        -F.logsigmoid(b * c) - 0.5 * F.logsigmoid(-b * c) - 0.5 * F.logsigmoid(-b * r)
    ),
    "bco_pair": lambda o, b, c, r: -F.logsigmoid(b * c) - F.logsigmoid(-b * r),
    "sppo_hard": lambda o, b, c, r: (c - 0.5 / b) ** 2 + (r + 0.5 / b) ** 2,
    "apo_zero": lambda o, b, c, r: 1 - torch.sigmoid(b * c) + torch.sigmoid(b * r),
    "apo_down": lambda o, b, c, r: torch.sigmoid(b * c) + 1 - torch.sigmoid(b * (c - r)),
    "discopop": lambda o, b, c, r: _discopop(o, b * (c - r)),
}
"""loss_type -> (config, beta, log ratios of chosen and of rejected) -> losses"""


class Ipo(Dpo):
    """Identity preference optimisation (Azar et al. 2024), of means over the row's tokens."""

    def losses(
        self, chosen: Tensor, rejected: Tensor, chosen_count: Tensor, rejected_count: Tensor
    ) -> Tensor:
        gap = chosen / chosen_count - rejected / rejected_count
        return (gap - 1 / (2 * self._config.number("beta"))) ** 2


class Simpo(PairLoss):
    """Simple preference optimisation (Meng et al. 2024): mean log-probabilities, no reference."""

    names: tuple[str, ...] = (*_REWARDS, *_LOGPS, "nll_loss")

    def of_rows(self, rows: Rows, logps: Tensor, side: Side) -> tuple[Tensor, Mapping[str, Tensor]]:
        mean = rows.sum(logps) / _safe(rows.counts, rows)
        chosen, rejected = _halves(mean)
        config, beta = self._config, self._config.number("beta")
        margin = beta * (chosen - rejected - config.number("simpo_gamma") / beta)
        losses = _smoothed(config, margin) - config.number("cpo_alpha") * chosen
        return losses, {**_reported(beta * chosen, beta * rejected, mean), "nll_loss": -chosen}


class Orpo(PairLoss):
    """Odds ratio preference optimisation (Hong et al. 2024): cross entropy and an odds ratio."""

    names: tuple[str, ...] = (*_REWARDS, *_LOGPS, "nll_loss", "log_odds_ratio", "log_odds_chosen")

    def of_rows(self, rows: Rows, logps: Tensor, side: Side) -> tuple[Tensor, Mapping[str, Tensor]]:
        # -1 stands for rows that are none: 0 is the logarithm of 1, whose odds are infinite.
        mean = torch.where(rows.present, rows.sum(logps) / _safe(rows.counts, rows), -1.0)
        chosen, rejected = _halves(mean)
        odds = (chosen - rejected) - (_log_1_minus_exp(chosen) - _log_1_minus_exp(rejected))
        ratio, beta = F.logsigmoid(odds), self._config.number("beta")
        sums = _reported(beta * chosen, beta * rejected, mean)
        more = {"nll_loss": -chosen, "log_odds_ratio": ratio, "log_odds_chosen": odds}
        return -chosen - beta * ratio, {**sums, **more}


def _log_1_minus_exp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0. It uses the form that loses no digits on each side of -log 2."""
    near = x > -0.6931471805599453
    small = torch.where(near, x, -0.5)
    large = torch.where(near, -1.0, x)
    return torch.where(near, torch.log(-torch.expm1(small)), torch.log1p(-torch.exp(large)))


class Reward(PairLoss):
    """A reward model of pairs (Bradley and Terry 1952): the score at the last token of a row."""

    names: tuple[str, ...] = _REWARDS
    needs: Set[str] = frozenset({"values"})

    def of_rows(self, rows: Rows, logps: Tensor, side: Side) -> tuple[Tensor, Mapping[str, Tensor]]:
        chosen, rejected = _halves(rows.end(side["values"]))
        gap = chosen - rejected
        if "margin" in side:
            gap = gap - _halves(rows.value(side["margin"]))[0]
        losses = -F.logsigmoid(gap)
        losses = losses + self._config.number("center_rewards_coefficient") * (
            (chosen + rejected) ** 2
        )
        sums = _reported(chosen, rejected, rows.counts)
        return losses, {name: sums[name] for name in self.names}


class Kto:
    """Kahneman-Tversky optimisation (Ethayarajh et al. 2024) of rated rows."""

    names: tuple[str, ...] = ("rewards/chosen", "rewards/rejected", *_LOGPS, "kl")
    needs: Set[str] = frozenset({"reference", "label"})
    needs_entropy = False
    trains_entropy = False

    def __init__(self, config: ObjectiveConfig, combine: Combine = identity) -> None:
        self._config, self._combine = config, combine

    def __call__(self, logps: Tensor, targets: Tensor, documents: Tensor, side: Side) -> Loss:
        config, rows = self._config, Rows.of(targets, documents)
        policy = rows.sum(logps)
        ratios, label = policy - rows.sum(side["reference"]), rows.value(side["label"])
        wanted, unwanted = label > 0, label < 0
        base = rows.present & (label == 0)
        found = torch.stack([_sum_of(ratios, base), base.sum(dtype=torch.float64)]).detach()
        gap, count = self._combine(found)
        kl = (gap / count.clamp_min(1)).clamp_min(0)
        beta = config.number("beta")
        good = 1 - torch.sigmoid(beta * (ratios - kl))
        bad = 1 - torch.sigmoid(beta * (kl - ratios))
        total = config.number("desirable_weight") * _sum_of(good, wanted)
        total = total + config.number("undesirable_weight") * _sum_of(bad, unwanted)
        rated = (wanted | unwanted).sum(dtype=torch.float64)
        sums = {"kl": (kl * rated, rated)}
        for name, which in (("chosen", wanted), ("rejected", unwanted)):
            number = which.sum(dtype=torch.float64)
            sums[f"rewards/{name}"] = (_sum_of(beta * ratios.detach(), which), number)
            sums[f"logps/{name}"] = (_sum_of(policy.detach(), which), number)
        return Loss(total, sums)

    def weigh(
        self, targets: NDArray[np.int64], documents: NDArray[np.int32], side: SideArrays
    ) -> int:
        rated = np.where(side["label"] != 0, targets, -100)
        return int((count_rows(rated, documents) > 0).sum())


def _sum_of(values: Tensor, which: Tensor) -> Tensor:
    return values.masked_fill(~which, 0.0).sum()
