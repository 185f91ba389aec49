"""What PipeMare adds to an optimizer (Yang et al., arXiv 1910.05124, sections 3.1 and 3.2).

A gradient of stage s is late by about tau = (2 (p - 1 - s) + 1) / m steps of m microbatches.

    T1  the learning rate of step k is divided by tau ^ (1 - min(k / K, 1)), where tau is above 1.
        After K steps it is the run's.
    T2  the mean movement of the weights in a step, delta <- g delta + (1 - g) (w' - w) with
        g = D ^ (1 / tau): the backward estimates the weights of its forward with it
        (`weight_versions.py`). delta is a part of the state, one slot more of the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.core.sharding.optimizer_state import VELOCITY
from holdfast.training.optimizers.optimizer import Optimizer, SlotTensors


@dataclass(frozen=True)
class StageDelay:
    """The place of a rank in its pipeline, and K and D of the paper.

    replicas: of the present generation. Each of them computes with the same delay, whatever its
    share of a step: they must stay equal.
    """

    ranks: int
    stage: int
    replicas: Callable[[], int]
    steps: int
    decay: float

    def delay(self, microbatches: int) -> float:
        """tau, in steps of so many microbatches of all replicas."""
        return (2 * (self.ranks - 1 - self.stage) + 1) * self.replicas() / microbatches

    def rate_factor(self, step: int, microbatches: int) -> float:
        """What T1 multiplies the learning rate of a step by."""
        late = max(1.0, self.delay(microbatches))
        return float(late ** (min(step / self.steps, 1.0) - 1.0))

    def share_kept(self, microbatches: int) -> float:
        """g: what T2 keeps of the movements before a step."""
        return float(self.decay ** (1 / self.delay(microbatches)))


class Pipemare:
    """An `Optimizer` of one stage around another. parameters: what `inner` updates."""

    def __init__(self, inner: Optimizer, parameters: Sequence[Tensor], stage: StageDelay):
        self._inner, self._parameters, self._stage = inner, list(parameters), stage
        self.velocity = [torch.zeros_like(parameter) for parameter in parameters]

    @property
    def slots(self) -> list[SlotTensors]:
        return [*self._inner.slots, SlotTensors(VELOCITY, [*self.velocity])]

    def set_gradients(self, gradients: Sequence[Tensor]) -> None:
        self._inner.set_gradients(gradients)

    @torch.no_grad()
    def apply(self, step: int, learning_rate: float, divisor: float, microbatches: int = 1) -> None:
        """As `Optimizer.apply`, with the stage's learning rate."""
        before = [parameter.clone() for parameter in self._parameters]
        rate = learning_rate * self._stage.rate_factor(step, microbatches)
        self._inner.apply(step, rate, divisor, microbatches)
        kept = self._stage.share_kept(microbatches)
        for velocity, old, new in zip(self.velocity, before, self._parameters, strict=True):
            velocity.mul_(kept).add_(new - old, alpha=1 - kept)
