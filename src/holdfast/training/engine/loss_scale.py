"""Dynamic loss scaling: what keeps small gradients in the range of float16.

Micikevicius et al. (2018), section 3.2. The backward pass begins with the scale in place of 1, and
the optimizer divides by it. If the scaled gradient is not finite though every loss is, all ranks
skip the step. Parameters and optimizer stay as they are, and the scale is halved. After 2,000 good
steps in sequence it doubles.

At the smallest scale nothing is skipped. A gradient that is not finite there is an error, as in
every other precision.

The scale is a part of the state. All ranks hold the same, so they decide alike.
"""

from __future__ import annotations

from dataclasses import replace
from math import isfinite

import torch
from torch import Tensor

from holdfast.core.sharding.state_table import LOSS_SCALE_ROW
from holdfast.training.engine.state import LocalTensor
from holdfast.training.engine.vote import StepVerdict

_INITIAL_EXPONENT = 16  # log2 of the scale that a run begins with

_GOOD_STEPS = 2000  # steps without an overflow after which the scale doubles


class LossScale:
    """What the gradients of the open step carry: the state of float16, and 1 for other dtypes.

    tokens: of a microbatch. A loss is a sum over about so many, and the scale is of their mean.
    device: of the state. is_dynamic: False: nothing is scaled, and there is no state.
    """

    def __init__(self, tokens: int, device: torch.device, *, is_dynamic: bool) -> None:
        self._unit = float(1 << (tokens.bit_length() - 1))  # a power of two: scaling is exact
        # log2 of the scale, less that of the initial one; good steps since it changed. So zeros
        # are the state of a new run.
        self._words = torch.zeros(2, dtype=torch.int64, device=device) if is_dynamic else None
        self._exponent = self._good_steps = 0

    def begin(self) -> None:
        """Read the state for a step: it may have been loaded or sent since the last one."""
        if self._words is not None:
            self._exponent, self._good_steps = self._words.tolist()

    @property
    def scale(self) -> float:
        """The scale of the mean loss; 0: the loss is not scaled."""
        return 0.0 if self._words is None else 2.0 ** (_INITIAL_EXPONENT + self._exponent)

    @property
    def factor(self) -> float:
        """What multiplies the sum of a microbatch's losses, and so each gradient."""
        return 1.0 if self._words is None else self.scale / self._unit

    def seed(self, loss: Tensor) -> Tensor | None:
        """What the backward pass of `loss` begins with; None: 1. A loss may have sums after it."""
        is_one = self._words is None and loss.dim() == 0
        return None if is_one else torch.full_like(loss, self.factor)

    def judge(self, verdict: StepVerdict) -> StepVerdict:
        """Decide whether the step is skipped: the same on all ranks, because all have voted."""
        overflowed = not verdict.is_finite and isfinite(verdict.loss)
        return replace(verdict, is_skipped=overflowed and self.scale > 1.0)

    def settle(self, verdict: StepVerdict) -> StepVerdict:
        """Take the step's result into the state. Returns the verdict with the step's scale."""
        settled = replace(verdict, loss_scale=self.scale)
        if self._words is None:
            return settled
        exponent, good = self._exponent, self._good_steps + 1
        if verdict.is_skipped:
            exponent, good = exponent - 1, 0
        elif good >= _GOOD_STEPS:
            exponent, good = exponent + 1, 0
        self._words.copy_(torch.tensor([exponent, good]))
        return settled

    def state(self) -> list[LocalTensor]:
        """The state for a checkpoint; the same storage every time."""
        if self._words is None:
            return []
        return [LocalTensor(LOSS_SCALE_ROW.name, self._words, (0,), LOSS_SCALE_ROW.shape)]

    def reset(self) -> None:
        """The state of a new run."""
        if self._words is not None:
            self._words.zero_()


NOT_SCALED = LossScale(1, torch.device("cpu"), is_dynamic=False)
"""No scaling: it has no state, and never changes."""
