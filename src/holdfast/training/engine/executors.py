"""The forward and backward passes of a share: what runs them, and in which order.

A replica that is one stage runs microbatch after microbatch. A pipeline runs a schedule: a table
of actions per stage (`core/schedule/table.py`), executed by `parallel/pipeline/pipeline.py`.
`stage_work.py` has what an action does to the model. In both, gradients of a stage reach the
reducer in rising order of microbatches, because its tree counts on it. Losses are known on the last
stage.

Every rank of a replica is fed the tokens of its samples. The first stage embeds them, the last
one reads their targets, and all of them need the documents. So only activations and their
gradients travel between stages, and their shapes follow from the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from holdfast.config.sections.layout import LayoutConfig
from holdfast.config.sections.pipeline_schedules import SCHEDULE_KINDS
from holdfast.core.schedule.named import build_schedule
from holdfast.core.schedule.table import Schedule, forward_only
from holdfast.core.spans import COMPUTE
from holdfast.data.stream.loader import TensorMicrobatch
from holdfast.layout import Replica
from holdfast.model.stage import StagePart, leave_weight_gradients
from holdfast.parallel.axes.process_groups import ProcessGroups
from holdfast.parallel.axes.tensor_parallel import residual_shape
from holdfast.parallel.comm.trace import SpanRecorder
from holdfast.parallel.gradients.leaf_progress import StageParameters
from holdfast.parallel.pipeline.pipeline import PipelineInterpreter
from holdfast.training.engine.loss_scale import NOT_SCALED, LossScale
from holdfast.training.engine.objective import NextTokenObjective
from holdfast.training.engine.stage_work import (
    GradientListener,
    RankStage,
    RankStages,
    RunStage,
    ShareWork,
)

Share = Sequence[tuple[int, Any]]
"""Microbatches to compute, as the task feeds them, each with its number in the step."""


def token_arguments(batch: TensorMicrobatch) -> tuple[Any, ...]:
    """What the decoder's objective takes of a microbatch."""
    return batch.inputs, batch.targets, batch.documents, batch.side


class Executor:
    """Runs the passes of this rank's part of a replica.

    is_asynchronous: a step's passes begin before the update of the step before it. loss_scale:
    what its backward passes begin with. arguments: what the objective takes of a microbatch.
    """

    is_asynchronous = False
    loss_scale: LossScale = NOT_SCALED

    def __init__(self, arguments: Callable[[Any], tuple[Any, ...]] = token_arguments) -> None:
        self.arguments = arguments

    def train(self, share: Share, listener: GradientListener, losses: list[Tensor]) -> None:
        """Run forward and backward of each. A last stage adds the loss sums, in order, to `losses`
        as they come, so they stay there if this is interrupted."""
        raise NotImplementedError

    def evaluate(self, batches: Sequence[Any], on_progress: Callable[[], None]) -> list[Tensor]:
        """Run forward of each, without gradients. Return the loss sums of a last stage."""
        raise NotImplementedError


class SingleStageExecutor(Executor):
    """One stage: the objective maps a microbatch to its loss."""

    def __init__(
        self,
        objective: nn.Module,
        recorder: SpanRecorder | None = None,
        arguments: Callable[[Any], tuple[Any, ...]] = token_arguments,
    ):
        super().__init__(arguments)
        self._objective, self._recorder = objective, recorder

    def train(self, share: Share, listener: GradientListener, losses: list[Tensor]) -> None:
        for leaf, batch in share:
            listener.start_leaf(leaf)
            with self._span(f"F{leaf}"):
                loss = self._objective(*self.arguments(batch))
            with self._span(f"B{leaf}"):
                loss.backward(self.loss_scale.seed(loss))
            listener.end_leaf()
            losses.append(loss.detach())
            listener.check()

    def evaluate(self, batches: Sequence[Any], on_progress: Callable[[], None]) -> list[Tensor]:
        losses = []
        for batch in batches:
            on_progress()
            losses.append(self._objective(*self.arguments(batch)))
        return losses

    def _span(self, name: str) -> AbstractContextManager[None]:
        return self._recorder.span(COMPUTE, name) if self._recorder else nullcontext()


class PipelinedExecutor(Executor):
    """One or several stages of a pipeline: runs this rank's row of the layout's schedule.

    dim, dtype: of the residual stream that passes between stages.
    """

    def __init__(
        self,
        objective: nn.Module,
        groups: ProcessGroups,
        layout: LayoutConfig,
        dim: int,
        dtype: torch.dtype,
        device: torch.device,
        arguments: Callable[[Any], tuple[Any, ...]] = token_arguments,
    ):
        super().__init__(arguments)
        pipeline = groups.replica_groups.pipeline
        assert pipeline is not None
        self._objective, self._schedule, self._dtype = objective, layout.schedule, dtype
        self.ranks, self._tp, self._cp = map(groups.degree, ("pp", "tp", "cp"))
        self._virtual = max(1, len(groups.replica.stages) // self.ranks)
        self._is_folded = groups.replica.is_folded
        self._dim, self._sequence_parallel = dim, layout.sequence_parallel
        late = None
        if SCHEDULE_KINDS[layout.schedule].splits_backward:
            late = leave_weight_gradients(objective)
        held = self._held_stages(groups.replica, groups.coordinate.pp)
        self._stages = RankStages(held, self.ranks * self._virtual - 1, self.boundary, late)
        base = {
            number: RankStage(
                partial(self.run_base_stage, self._part(groups.replica, number)), (), None
            )
            for number in held
        }
        self._base_stages = replace(self._stages, held=base)
        pipes = groups.replica_groups.pipes
        self.interpreter = PipelineInterpreter(
            pipeline, device, recorder=groups.recorder, pipes=pipes
        )

    @property
    def is_overlapping(self) -> bool:
        """Return True if its schedule does not empty the pipeline between steps."""
        return SCHEDULE_KINDS[self._schedule].is_asynchronous

    @property
    def only_stage(self) -> tuple[int, RankStage, bool]:
        """Number of the one stage of this rank, the stage, and whether it is the last."""
        ((number, stage),) = self._stages.held.items()
        return number, stage, number == self._stages.last

    def schedule_for(self, microbatches: int) -> Schedule:
        """Return the schedule of a share. A share with too few microbatches for 1F1B to fill the
        pipeline runs as GPipe. A plan refuses that, but a dealing may leave a replica little."""
        name = self._schedule
        if name == "1f1b" and microbatches < self.ranks:
            name = "gpipe"
        return build_schedule(name, self.ranks, microbatches, self._virtual)

    def train(self, share: Share, listener: GradientListener, losses: list[Tensor]) -> None:
        if share:
            share = self._with_base(share)
            work = ShareWork(self._stages, self.loss_scale, share, losses, listener)
            self.interpreter.run(self.schedule_for(len(share)), work)

    def evaluate(
        self, batches: Sequence[TensorMicrobatch], on_progress: Callable[[], None]
    ) -> list[Tensor]:
        losses: list[Tensor] = []
        if batches:
            share = self._with_base(list(enumerate(batches)))
            work = ShareWork(self._stages, self.loss_scale, share, losses, None, on_progress)
            schedule = forward_only(self.ranks, len(batches), self._virtual, self._is_folded)
            self.interpreter.run(schedule, work)
        return losses

    def _with_base(self, share: Share) -> Share:
        """Add the log-probabilities of the base of adapters to a share, if the loss needs them: a
        forward pass of its own through all stages."""
        needs_base = getattr(self._objective, "needs_base", None)
        if needs_base is None or not needs_base(share[0][1].side):
            return share
        found: list[Tensor] = []
        work = ShareWork(self._base_stages, NOT_SCALED, share, found, None)
        with torch.no_grad():
            schedule = forward_only(self.ranks, len(share), self._virtual, self._is_folded)
            self.interpreter.run(schedule, work)
        if not found:  # another rank has the last stage
            return share
        return [
            (leaf, replace(batch, side={**batch.side, "reference": base}))
            for (leaf, batch), base in zip(share, found, strict=True)
        ]

    def _base_run(self, replica: Replica, number: int) -> RunStage:
        return partial(self.run_base_stage, self._part(replica, number))

    def run_base_stage(
        self, part: StagePart | None, batch: TensorMicrobatch, incoming: Tensor | None
    ) -> Tensor:
        """The same as `run_stage`, without adapters."""
        run = cast(Any, self._objective).base_forward
        out: Tensor = run(batch.inputs, batch.targets, batch.documents, incoming, part)
        return out

    def run_stage(
        self, part: StagePart | None, batch: TensorMicrobatch, incoming: Tensor | None
    ) -> Tensor:
        """A stage's own part of the forward: its residual stream, or on the last stage a loss."""
        out: Tensor = self._objective(*self.arguments(batch), incoming=incoming, part=part)
        return out

    def boundary(self, batch: TensorMicrobatch) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of what passes between two stages for a microbatch."""
        rows, length = batch.inputs.shape
        length //= self._cp
        shape = residual_shape(rows, length, self._dim, self._tp, self._sequence_parallel)
        return shape, self._dtype

    def _part(self, replica: Replica, number: int) -> StagePart | None:
        """Which of this rank's blocks a stage has; None: it has them all."""
        if self._virtual == 1:
            return None
        return StagePart(replica.stage_blocks(number), number == len(replica.stages) - 1)

    def _held_stages(self, replica: Replica, pp: int) -> dict[int, RankStage]:
        """The stages of this rank. A tied embedding belongs to the first."""
        trained = [p for p in self._objective.parameters() if p.requires_grad]
        numbers = replica.stages_at(pp)
        if self._virtual == 1:
            return {pp: RankStage(partial(self.run_stage, None), trained, None)}
        decoder = cast(NextTokenObjective, self._objective).decoder
        held: dict[int, RankStage] = {}
        for number in numbers:
            part = self._part(replica, number)
            assert part is not None, "a rank has several stages"
            is_last = part.is_last
            modules: list[nn.Module | None] = [decoder.layers[b] for b in part.blocks]
            modules += [decoder.embed] if number == 0 else []
            modules += [decoder.norm, decoder.head, decoder.score] if is_last else []
            found = [p for m in modules if m is not None for p in m.parameters()]
            own = StageParameters(found, len(numbers))
            reached = [p for p in found if p.requires_grad]
            if is_last and decoder.config.has_tied_head and decoder.embed is not None:
                reached += [p for p in decoder.embed.parameters() if p.requires_grad]
                if 0 not in numbers:
                    own = StageParameters([*found, *decoder.embed.parameters()], len(numbers))
            held[number] = RankStage(partial(self.run_stage, part), reached, own)
        return held
