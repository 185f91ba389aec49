"""The versions of its weights that a rank holds while microbatches of several steps are under way.

An asynchronous schedule (`core/schedule/step_window.py`) runs forwards of a later step before this
step's update, and their backwards after it. What a backward computes with is the schedule's rule:

    pipedream      the weights of its own forward, which are kept until then (weight stashing,
                   Harlap et al., arXiv 1806.03377)
    pipedream-2bw  the same; and all microbatches of a step use one version, that before the newest
                   update (Narayanan et al., arXiv 2006.09503): two versions, however deep the line
    pipemare       the newest weights, less the steps between times their mean movement (discrepancy
                   correction, Yang et al., arXiv 1910.05124): one version

The module computes on a version, never on what the optimizer updates. To use a version, its tensors
become the memory of the module's parameters. Graphs of forwards keep the memory that they used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakSet

import torch
from torch import Tensor

from holdfast.core.sharding.optimizer_state import VELOCITY
from holdfast.training.optimizers.optimizer import Optimizer, SlotTensors


class WeightVersion:
    """Weights of the module. number: updates before it, counted from the start of this process."""

    def __init__(self, tensors: list[Tensor], number: int) -> None:
        self.tensors, self.number = tensors, number


class WeightVersions:
    """The versions of one rank, under one of the rules above.

    parameters: what the module computes with. Their present memory has the newest weights whenever
    `update` is called. velocity: for pipemare, the mean movement of each parameter in a step.
    """

    def __init__(self, parameters: Sequence[Tensor], rule: str) -> None:
        self._parameters, self._rule = list(parameters), rule
        self._source = [parameter.data for parameter in parameters]
        self.velocity: Sequence[Tensor] = ()
        self._held: WeakSet[WeightVersion] = WeakSet()
        self._of_forward: dict[int, WeightVersion] = {}  # by microbatch
        self._number_of_forward: dict[int, int] = {}
        self._previous: WeightVersion | None = None
        self._goes_on = self._is_corrected = False
        self._newest = self._made(0)
        self.use_newest()

    @property
    def count(self) -> int:
        """The versions that are held now."""
        return len(self._held)

    @property
    def is_single(self) -> bool:
        """Return True if the weights of a forward are not kept for its backward."""
        return self._rule == "pipemare"

    def update(self) -> None:
        """Take the newest weights from where the optimizer's update, or a load, has put them."""
        number = self._newest.number + 1
        is_needed = self._newest in self._of_forward.values()
        previous = None
        if self._rule == "pipedream-2bw" and self._goes_on:
            previous, is_needed = self._newest, True
        self._previous, self._goes_on = previous, False
        if is_needed:
            self._newest = self._made(number)
        else:
            self._newest.number = number
            _copy(self._newest.tensors, self._source)
        self.use_newest()

    def use_newest(self) -> None:
        """Let the module compute with the newest weights."""
        if self._is_corrected:
            _copy(self._newest.tensors, self._source)
            self._is_corrected = False
        self._use(self._newest)

    def use_for_forward(self, microbatch: int, is_of_later_step: bool) -> None:
        """Let the module compute with the weights of a microbatch's forward."""
        self.use_newest()
        self._number_of_forward[microbatch] = self._newest.number
        if self.is_single:
            return
        version = self._newest
        if self._previous is not None and not is_of_later_step:
            version = self._previous
        self._of_forward[microbatch] = version
        self._use(version)

    def use_for_backward(self, microbatch: int) -> None:
        """Let the module compute with the weights of a microbatch's backward."""
        number = self._number_of_forward.pop(microbatch)
        if not self.is_single:
            self._use(self._of_forward.pop(microbatch))
            return
        self.use_newest()
        steps = self._newest.number - number
        if steps:
            self._correct(steps)

    def end_step(self, microbatches: int, goes_on: bool) -> None:
        """A step of so many microbatches was computed; the next ones count from its end. goes_on:
        some microbatches are under way."""
        self._of_forward = {m - microbatches: v for m, v in self._of_forward.items()}
        self._number_of_forward = {
            m - microbatches: number for m, number in self._number_of_forward.items()
        }
        self._goes_on = goes_on
        self.use_newest()

    def forget(self) -> None:
        """No microbatch is under way any more: only the newest weights are of use."""
        self._of_forward, self._number_of_forward = {}, {}
        self._previous, self._goes_on = None, False
        self.use_newest()

    @torch.no_grad()
    def _correct(self, steps: int) -> None:
        """Estimate the weights of so many steps ago, in the memory of the newest."""
        for weight, moved in zip(self._newest.tensors, self.velocity, strict=True):
            weight.sub_(moved.to(weight.dtype), alpha=steps)
        self._is_corrected = True

    def _made(self, number: int) -> WeightVersion:
        made = WeightVersion([torch.empty_like(each) for each in self._source], number)
        _copy(made.tensors, self._source)
        self._held.add(made)
        return made

    def _use(self, version: WeightVersion) -> None:
        for parameter, tensor in zip(self._parameters, version.tensors, strict=True):
            parameter.data = tensor


@torch.no_grad()
def _copy(into: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    torch._foreach_copy_(list(into), list(source))


@dataclass(frozen=True)
class StageDelay:
    """What PipeMare adds to an optimizer (Yang et al., arXiv 1910.05124, sections 3.1 and 3.2).

    A gradient of stage s is late by about tau = (2 (p - 1 - s) + 1) / m steps of m microbatches.

        T1  the learning rate of step k is divided by tau ^ (1 - min(k / K, 1)), where tau is above
            1. After K steps it is the run's.
        T2  the mean movement of the weights in a step, delta <- g delta + (1 - g) (w' - w) with
            g = D ^ (1 / tau): the backward estimates the weights of its forward with it. delta is a
            part of the state, one slot more of the optimizer.

    Each replica computes with the same delay, whatever its share of a step: they must stay equal.
    """

    ranks: int
    stage: int
    replicas: Callable[[], int]  # of the present generation
    steps: int  # K
    decay: float  # D

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
