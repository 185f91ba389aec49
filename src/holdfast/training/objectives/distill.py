"""Distillation: a student learns from the likeliest tokens of a teacher.

The divergence is TRL's generalised Jensen-Shannon divergence (Agarwal et al. 2024, equation 1).
Of its `beta`, 0 is the forward KL (teacher, student), 1 the reverse one. Both distributions are
taken at `temperature`, without a factor of its square. The teacher's `top_k` tokens are outcomes of
their own, and all other tokens are one further outcome. So with all tokens it is TRL's.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from holdfast.config.sections.objective import ObjectiveConfig
from holdfast.data.stream.reference import TEACHER_IDS as IDS
from holdfast.data.stream.reference import TEACHER_LOGPS as LOGPS
from holdfast.training.objectives.policy import OF_ROWS, REPORTED, row_means
from holdfast.training.objectives.preference import identity
from holdfast.training.objectives.protocol import Combine, Loss, Side
from holdfast.training.objectives.rows import IGNORED_TARGET, Rows

_LEAST = 1e-30  # probability of the other tokens, if rounding leaves none


@dataclass(frozen=True)
class TokenLosses:
    """The losses of some targets [c]; 0 for a target of -100."""

    total: Tensor  # with a gradient
    parts: Mapping[str, Tensor]  # by `Distill.parts`


class Distill:
    """alpha * cross entropy + (1 - alpha) * divergence from the teacher. config: the section
    `objective`."""

    parts: tuple[str, ...] = ("cross_entropy", "divergence")  # a value of each target
    names: tuple[str, ...] = (*parts, *OF_ROWS)
    needs: Set[str] = frozenset({IDS, LOGPS})
    needs_entropy = False
    trains_entropy = False

    def __init__(self, config: ObjectiveConfig, combine: Combine = identity) -> None:
        self._alpha, self._beta = config.number("alpha"), config.number("beta")
        self._temperature = config.number("temperature")

    def __call__(self, logps: Tensor, targets: Tensor, documents: Tensor, side: Side) -> Loss:
        raise NotImplementedError("it is a function of logits")

    def weigh(
        self,
        targets: NDArray[np.int64],
        documents: NDArray[np.int32],
        side: Mapping[str, NDArray[Any]],
    ) -> int:
        return int((targets != IGNORED_TARGET).sum())

    def of_logits(self, logits: Tensor, targets: Tensor, ids: Tensor, logps: Tensor) -> TokenLosses:
        """logits: [c, V], at least float32; targets: [c]; ids, logps: [c, K]"""
        carried = targets != IGNORED_TARGET
        index = targets.clamp_min(0)[:, None]
        entropy = logits.logsumexp(-1) - logits.gather(1, index)[:, 0]
        scaled = logits / self._temperature
        student = scaled.gather(1, ids.long()) - scaled.logsumexp(-1, keepdim=True)
        teacher = logps.to(student.dtype)
        if ids.shape[1] < logits.shape[1]:
            student, teacher = _with_rest(student), _with_rest(teacher)
        parts = {
            "cross_entropy": entropy.masked_fill(~carried, 0.0),
            "divergence": self._divergence(student, teacher).masked_fill(~carried, 0.0),
        }
        mixed = self._alpha * parts["cross_entropy"] + (1 - self._alpha) * parts["divergence"]
        return TokenLosses(mixed, parts)

    def of_rows(
        self, targets: Tensor, documents: Tensor | None, side: Side
    ) -> Mapping[str, tuple[Tensor, Tensor]]:
        """Return sums and counts of what is known of completions; nothing of a dataset's rows."""
        if documents is None or not side.keys() & set(REPORTED):
            return {}
        return row_means(Rows.of(targets, documents), side)

    def _divergence(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Log-probabilities [c, n] -> [c]"""
        if self._beta == 0:
            return _kl(teacher, student)
        if self._beta == 1:
            return _kl(student, teacher)
        beta = torch.tensor(self._beta, dtype=student.dtype, device=student.device)
        both = torch.stack([student + torch.log1p(-beta), teacher + beta.log()])
        mixture = both.logsumexp(0)
        return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p, q) of log-probabilities [c, n] -> [c]"""
    return F.kl_div(q, p, reduction="none", log_target=True).sum(-1)


def _with_rest(logps: Tensor) -> Tensor:
    """Add the log-probability of all other tokens.  [c, K] -> [c, K + 1]"""
    rest = 1.0 - logps.exp().sum(-1, keepdim=True)
    return torch.cat([logps, rest.clamp_min(_LEAST).log()], dim=-1)
