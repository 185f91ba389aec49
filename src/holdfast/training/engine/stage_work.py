"""What the actions of a pipeline's schedule do to the model, for one share of microbatches.

A rank may have several stages, and a backward may come in two halves. The first half (`I`) gives
the gradient of what came in. With it come the gradients of all parameters but the weights of linear
layers, whose products wait for the second half (`W`, `model/late_gradients.py`). All gradients of a
microbatch go to the listener in the second half, so a stage's leaves stay in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor

from holdfast.model.late_gradients import LateGradient, LateGradients
from holdfast.parallel.gradients.leaf_progress import StageParameters
from holdfast.training.engine.loss_scale import LossScale

Gradients = Sequence[tuple[Tensor, Tensor]]
"""(parameter, its gradient)"""


RunStage = Callable[[Any, Tensor | None], Tensor]
"""(microbatch, what comes in) -> what goes out, or the loss."""


class GradientListener(Protocol):
    """Receiver of the gradients of a microbatch while its backward pass runs."""

    def start_leaf(self, leaf: int, part: StageParameters | None = None) -> None: ...
    def give(self, parameter: Tensor, gradient: Tensor) -> None: ...
    def end_leaf(self) -> None: ...
    def check(self) -> None: ...


@dataclass(frozen=True)
class RankStage:
    """One of a rank's stages.

    run: its forward pass. parameters: those of the stage that are trained. part: those that it
    gives gradients of; None: the rank has no other stage.
    """

    run: RunStage
    parameters: Sequence[Tensor]
    part: StageParameters | None

    def owns(self, parameter: Tensor) -> bool:
        """Return False for a tied embedding, of which another stage of the rank has the rest."""
        return self.part is None or any(parameter is own for own in self.part.parameters)


@dataclass(frozen=True)
class RankStages:
    """All stages of a rank. last: number of the pipeline's last stage. late: of its linear layers,
    if backwards are split. boundary: shape and dtype of what passes between two stages."""

    held: dict[int, RankStage]
    last: int
    boundary: Callable[[Any], tuple[tuple[int, ...], torch.dtype]]
    late: LateGradients | None


class ShareWork:
    """What the interpreter's actions do: `SplitStageWork` for one share. listener: None: forward
    passes only. losses: takes those of a last stage."""

    def __init__(
        self,
        stages: RankStages,
        loss_scale: LossScale,
        share: Sequence[tuple[int, Any]],
        losses: list[Tensor],
        listener: GradientListener | None,
        on_progress: Callable[[], None] = lambda: None,
    ):
        self._stages, self._loss_scale = stages, loss_scale
        self._leaves = [leaf for leaf, _ in share]
        self._batches = [batch for _, batch in share]
        self._listener, self._on_progress = listener, on_progress
        # by stage and microbatch: what came in and went out; what a backward left for later
        self._activations: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        self._left: dict[tuple[int, int], tuple[Gradients, list[LateGradient]]] = {}
        self._carried: dict[int, dict[Tensor, Tensor]] = {}  # by microbatch, for another stage
        self._losses = losses

    def boundary(self, stage: int, microbatch: int) -> tuple[tuple[int, ...], torch.dtype]:
        return self._stages.boundary(self._batches[microbatch])

    def forward(self, stage: int, microbatch: int, incoming: Tensor | None) -> Tensor | None:
        self._on_progress()
        if incoming is not None and self._listener is not None:
            incoming.requires_grad_()
        out = self._stages.held[stage].run(self._batches[microbatch], incoming)
        if self._listener is not None:
            self._activations[stage, microbatch] = incoming, out
        if stage == self._stages.last:
            self._losses.append(out.detach())
            return None
        return out.detach()

    def backward(self, stage: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        if self._stages.late is not None:
            found = self.backward_input(stage, microbatch, gradient)
            self.backward_weight(stage, microbatch)
            return found
        assert self._listener is not None
        incoming, out = self._activations.pop((stage, microbatch))
        self._listener.start_leaf(self._leaves[microbatch], self._stages.held[stage].part)
        if out.requires_grad:  # not so of a first stage that is frozen
            torch.autograd.backward(out, self._seed(out, gradient))
        self._listener.end_leaf()
        self._listener.check()
        return None if incoming is None else incoming.grad

    def backward_input(self, stage: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        assert self._stages.late is not None
        incoming, out = self._activations.pop((stage, microbatch))
        parameters = self._stages.held[stage].parameters
        wanted = [*parameters] if incoming is None else [incoming, *parameters]
        if not out.requires_grad:  # a first stage that is frozen
            self._left[stage, microbatch] = (), self._stages.late.take()
            return None
        found = torch.autograd.grad(out, wanted, self._seed(out, gradient), allow_unused=True)
        direct = zip(parameters, found[len(wanted) - len(parameters) :], strict=True)
        kept = [(parameter, given) for parameter, given in direct if given is not None]
        self._left[stage, microbatch] = kept, self._stages.late.take()
        return None if incoming is None else found[0]

    @torch.no_grad()
    def backward_weight(self, stage: int, microbatch: int) -> None:
        assert self._listener is not None
        own = self._stages.held[stage]
        self._listener.start_leaf(self._leaves[microbatch], own.part)
        for parameter, gradient in self._gradients(stage, microbatch).items():
            if own.owns(parameter):
                self._listener.give(parameter, gradient)
            else:
                self._carried.setdefault(microbatch, {})[parameter] = gradient
        self._listener.end_leaf()
        self._listener.check()

    def _gradients(self, stage: int, microbatch: int) -> dict[Tensor, Tensor]:
        """Those of a microbatch by parameter, with what a later stage has of them."""
        direct, late = self._left.pop((stage, microbatch))
        carried: Iterator[tuple[Tensor, Tensor]] = iter(())
        if stage == 0:
            carried = iter(self._carried.pop(microbatch, {}).items())
        found: dict[Tensor, Tensor] = {}
        for parameter, gradient in chain(direct, carried, *(each.compute() for each in late)):
            before = found.get(parameter)
            found[parameter] = gradient if before is None else before + gradient
        return found

    def _seed(self, out: Tensor, gradient: Tensor | None) -> Tensor | None:
        """What the backward begins with: on the last stage, whose output is a loss, its scale."""
        return self._loss_scale.seed(out) if gradient is None else gradient
