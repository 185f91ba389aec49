"""The forward and backward passes of a share: what runs them, and in which order.

A replica that is one stage runs microbatch after microbatch. A pipeline runs a schedule: a table
of actions per stage (`core/schedule/table.py`), executed by `parallel/pipeline.py`; here stands
what an action does to the model. In both, gradients reach the reducer in rising order of
microbatches, because its tree counts on it, and losses are known on the last stage.

Every rank of a replica is fed the tokens of its samples. The first stage embeds them, the last
one reads their targets, and all of them need the documents. So only activations and their
gradients travel between stages, and their shapes follow from the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from holdfast.core.schedule.table import Schedule, build_schedule, forward_only
from holdfast.layout import AXES
from holdfast.parallel.pipeline import PipelineInterpreter
from holdfast.parallel.process_groups import ProcessGroups
from holdfast.parallel.tensor_parallel import residual_shape
from holdfast.parallel.trace import COMPUTE, SpanRecorder
from holdfast.train.loss_scale import NOT_SCALED, LossScale

Objective = Callable[..., Tensor]


class Inputs(Protocol):
    """The part of a microbatch that is computed on."""

    @property
    def inputs(self) -> Tensor: ...

    @property
    def targets(self) -> Tensor: ...

    @property
    def documents(self) -> Tensor | None: ...


class GradientListener(Protocol):
    """Receiver of the gradients of a microbatch while its backward pass runs."""

    def start_leaf(self, leaf: int) -> None: ...

    def end_leaf(self) -> None: ...

    def check(self) -> None: ...


class Executor(Protocol):
    """Runs the passes of this rank's part of a replica. Batches are what the task feeds.

    loss_scale: what its backward passes begin with.
    """

    loss_scale: LossScale

    def train(
        self,
        leaves: Sequence[int],
        batches: Sequence[Any],
        listener: GradientListener,
        losses: list[Tensor] | None = None,
    ) -> list[Tensor]:
        """Forward and backward of each; the loss sums, in order, or none but on a last stage.
        losses: they are put in there as they come, and stay there when this is interrupted."""
        ...

    def evaluate(self, batches: Sequence[Any], on_progress: Callable[[], None]) -> list[Tensor]:
        """Forward of each, without gradients; loss sums as above."""
        ...


def token_arguments(batch: Inputs) -> tuple[Any, ...]:
    """What the decoder's objective takes of a microbatch."""
    return batch.inputs, batch.targets, batch.documents


class SingleStageExecutor:
    """One stage: the objective maps a microbatch to its loss.

    arguments: what the objective takes of a microbatch.
    """

    def __init__(
        self,
        objective: nn.Module,
        recorder: SpanRecorder | None = None,
        arguments: Callable[[Any], tuple[Any, ...]] = token_arguments,
    ):
        self._objective, self._recorder, self.arguments = objective, recorder, arguments
        self.loss_scale = NOT_SCALED

    def train(
        self,
        leaves: Sequence[int],
        batches: Sequence[Any],
        listener: GradientListener,
        losses: list[Tensor] | None = None,
    ) -> list[Tensor]:
        losses = [] if losses is None else losses
        for leaf, batch in zip(leaves, batches, strict=True):
            listener.start_leaf(leaf)
            with self._span(f"F{leaf}"):
                loss = self._objective(*self.arguments(batch))
            with self._span(f"B{leaf}"):
                loss.backward(self.loss_scale.seed(loss))
            listener.end_leaf()
            losses.append(loss.detach())
            listener.check()
        return losses

    def evaluate(self, batches: Sequence[Any], on_progress: Callable[[], None]) -> list[Tensor]:
        losses = []
        for batch in batches:
            on_progress()
            losses.append(self._objective(*self.arguments(batch)))
        return losses

    def _span(self, name: str) -> AbstractContextManager[None]:
        return self._recorder.span(COMPUTE, name) if self._recorder else nullcontext()


class PipelinedExecutor:
    """One stage of several: runs this rank's column of a schedule.

    schedule: "gpipe" or "1f1b". dim, dtype: of the residual stream that passes between stages.
    """

    def __init__(
        self,
        objective: nn.Module,
        groups: ProcessGroups,
        schedule: str,
        dim: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        sequence_parallel: bool,
    ):
        assert groups.pipeline is not None
        self.arguments, self.loss_scale = token_arguments, NOT_SCALED
        self._objective, self._schedule, self._dtype = objective, schedule, dtype
        self._stages, self._tp, self._cp = map(groups.degree, ("pp", "tp", "cp"))
        self._dim, self._sequence_parallel = dim, sequence_parallel
        self._interpreter = PipelineInterpreter(
            groups.pipeline,
            device,
            recorder=groups.recorder,
            pipes=groups.replica_groups.pipes,
        )

    def schedule_for(self, microbatches: int) -> Schedule:
        """Return the schedule of a share. A share with too few microbatches for 1F1B to fill the
        pipeline runs as GPipe. A plan refuses that, but a dealing may leave a replica little."""
        name = self._schedule if microbatches >= self._stages else "gpipe"
        return build_schedule(name, self._stages, microbatches)

    def train(
        self,
        leaves: Sequence[int],
        batches: Sequence[Inputs],
        listener: GradientListener,
        losses: list[Tensor] | None = None,
    ) -> list[Tensor]:
        if not batches:
            return []
        work = _ShareWork(self, leaves, batches, listener)
        work.losses = work.losses if losses is None else losses
        self._interpreter.run(self.schedule_for(len(batches)), work)
        return work.losses

    def evaluate(self, batches: Sequence[Inputs], on_progress: Callable[[], None]) -> list[Tensor]:
        if not batches:
            return []
        work = _ShareWork(self, range(len(batches)), batches, None, on_progress)
        self._interpreter.run(forward_only(self._stages, len(batches)), work)
        return work.losses

    def run_stage(self, batch: Inputs, incoming: Tensor | None) -> Tensor:
        """The stage's own part of the forward: its residual stream, or on the last stage a loss."""
        out: Tensor = self._objective(*self.arguments(batch), incoming)
        return out

    def boundary(self, batch: Inputs) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of what passes between two stages for a microbatch."""
        rows, length = batch.inputs.shape
        length //= self._cp
        shape = residual_shape(rows, length, self._dim, self._tp, self._sequence_parallel)
        return shape, self._dtype

    @property
    def last_stage(self) -> int:
        return self._stages - 1


class _ShareWork:
    """What the interpreter's actions do: `StageWork` for one share."""

    def __init__(
        self,
        stage: PipelinedExecutor,
        leaves: Sequence[int],
        batches: Sequence[Inputs],
        listener: GradientListener | None,
        on_progress: Callable[[], None] = lambda: None,
    ):
        self._stage, self._leaves, self._batches = stage, leaves, batches
        self._listener, self._alive = listener, on_progress
        # what came in, what went out
        self._activations: dict[int, tuple[Tensor | None, Tensor]] = {}
        self.losses: list[Tensor] = []

    def boundary(self, stage: int, microbatch: int) -> tuple[tuple[int, ...], torch.dtype]:
        return self._stage.boundary(self._batches[microbatch])

    def forward(self, stage: int, microbatch: int, incoming: Tensor | None) -> Tensor | None:
        self._alive()
        if incoming is not None and self._listener is not None:
            incoming.requires_grad_()
        out = self._stage.run_stage(self._batches[microbatch], incoming)
        if self._listener is not None:
            self._activations[microbatch] = incoming, out
        if stage == self._stage.last_stage:
            self.losses.append(out.detach())
            return None
        return out.detach()

    def backward(self, stage: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        assert self._listener is not None
        incoming, out = self._activations.pop(microbatch)
        self._listener.start_leaf(self._leaves[microbatch])
        if gradient is None:  # the last stage: what came out is a loss
            gradient = self._stage.loss_scale.seed(out)
        torch.autograd.backward(out, gradient)
        self._listener.end_leaf()
        self._listener.check()
        return None if incoming is None else incoming.grad


def make_executor(
    objective: nn.Module,
    groups: ProcessGroups,
    schedule: str,
    dim: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    sequence_parallel: bool,
) -> Executor:
    """What fits this rank's replica."""
    if groups.replica.mesh_shape[AXES.index("pp")] == 1:
        return SingleStageExecutor(objective, groups.recorder)
    return PipelinedExecutor(
        objective,
        groups,
        schedule,
        dim,
        dtype,
        device,
        sequence_parallel=sequence_parallel,
    )
