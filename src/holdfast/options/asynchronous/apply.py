"""Runs the passes of an asynchronous schedule: step after step, without emptying the pipeline.

A step is one window of the schedule's table. When it ends, microbatches of later steps are under
way. There are graphs, values that a neighbour has sent, and gradients of early backwards. All of
that is of this process alone. A start from a state begins with an empty pipeline, in a new process
and in one that continues among other replicas.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from holdfast.config.run import RunConfig
from holdfast.core.schedule.step_window import look_ahead, step_window
from holdfast.core.schedule.table import Value
from holdfast.options.asynchronous.weight_versions import Pipemare, StageDelay, WeightVersions
from holdfast.options.protocols import Apply
from holdfast.training.engine.engine import StepEngine
from holdfast.training.engine.executors import Executor, PipelinedExecutor, Share
from holdfast.training.engine.protocols import StepFeed, StepShare
from holdfast.training.engine.stage_work import GradientListener, Gradients, RankStage
from holdfast.training.engine.state import Parameters


@dataclass
class UnderWay:
    """What is under way between two steps, by microbatch: counted from the first of the next step.
    graphs: what came in and went out of a forward whose backward has not run."""

    batches: list[Any] = field(default_factory=list)  # those that were looked ahead at
    graphs: dict[int, tuple[Tensor | None, Tensor]] = field(default_factory=dict)
    early: dict[int, Gradients] = field(default_factory=dict)  # of a step that has not begun
    losses: dict[int, Tensor] = field(default_factory=dict)  # the same
    carried: dict[Value, Tensor] = field(default_factory=dict)  # that a neighbour has sent

    def after(self, microbatches: int) -> UnderWay:
        """The same, counted from `microbatches` on."""
        return UnderWay(
            self.batches[microbatches:],
            {m - microbatches: graph for m, graph in self.graphs.items()},
            {m - microbatches: found for m, found in self.early.items()},
            {m - microbatches: loss for m, loss in self.losses.items()},
            {
                replace(v, microbatch=v.microbatch - microbatches): t
                for v, t in self.carried.items()
            },
        )


class WindowWork:
    """What the interpreter's actions do in the window of a step: a `StageWork`.

    leaves: of the step. batches: its microbatches, and those behind them.
    """

    def __init__(
        self,
        stage: tuple[int, RankStage, bool],
        boundary: Callable[[Any], tuple[tuple[int, ...], torch.dtype]],
        weights: WeightVersions,
        leaves: Sequence[int],
        batches: Sequence[Any],
        listener: GradientListener,
        under_way: UnderWay,
        losses: list[Tensor],
    ):
        self._number, self._stage, self._is_last = stage
        self._boundary, self._weights = boundary, weights
        self._leaves, self._batches, self._listener = leaves, batches, listener
        self._under_way, self._losses = under_way, losses

    def boundary(self, stage: int, microbatch: int) -> tuple[tuple[int, ...], torch.dtype]:
        return self._boundary(self._batches[microbatch])

    def forward(self, stage: int, microbatch: int, incoming: Tensor | None) -> Tensor | None:
        is_later = microbatch >= len(self._leaves)
        self._weights.use_for_forward(microbatch, is_later)
        if incoming is not None:
            incoming.requires_grad_()
        out = self._stage.run(self._batches[microbatch], incoming)
        self._under_way.graphs[microbatch] = incoming, out
        if not self._is_last:
            return out.detach()
        if is_later:
            self._under_way.losses[microbatch] = out.detach()
        else:
            self._losses.append(out.detach())
        return None

    def backward(self, stage: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        incoming, out = self._under_way.graphs.pop(microbatch)
        self._weights.use_for_backward(microbatch)
        if microbatch >= len(self._leaves):
            # Keep the gradients until their step begins: the sum is of this step's.
            parameters = list(self._stage.parameters)
            wanted = parameters if incoming is None else [incoming, *parameters]
            found = torch.autograd.grad(out, wanted, gradient, allow_unused=True)
            given = zip(parameters, found[len(wanted) - len(parameters) :], strict=True)
            self._under_way.early[microbatch] = [(p, each) for p, each in given if each is not None]
            return None if incoming is None else found[0]
        self._listener.start_leaf(self._leaves[microbatch], None)
        torch.autograd.backward(out, gradient)
        self._listener.end_leaf()
        self._listener.check()
        return None if incoming is None else incoming.grad

    @torch.no_grad()
    def give_early_gradients(self) -> None:
        """Give the listener what was computed of this step before it began."""
        for microbatch in [m for m in sorted(self._under_way.early) if m < len(self._leaves)]:
            self._listener.start_leaf(self._leaves[microbatch], None)
            for parameter, gradient in self._under_way.early.pop(microbatch):
                self._listener.give(parameter, gradient)
            self._listener.end_leaf()
            self._listener.check()


class AsynchronousExecutor(Executor):
    """An `Executor` whose steps overlap: the stage of a `PipelinedExecutor` under an asynchronous
    schedule.

    following: the microbatches behind those of the next call of `train`; it takes them.
    """

    is_asynchronous = True

    def __init__(self, inner: PipelinedExecutor, schedule: str, weights: WeightVersions):
        super().__init__(inner.arguments)
        self._inner, self._schedule, self.weights = inner, schedule, weights
        self.following: Sequence[Sequence[Any]] = ()
        self._under_way = UnderWay()

    def look_ahead(self) -> int:
        """Microbatches behind a step's that its window may take."""
        return look_ahead(self._inner.ranks)

    def forget(self) -> None:
        """Drop all that is under way: the next step begins with an empty pipeline."""
        self._under_way = UnderWay()
        self.weights.forget()

    def train(self, share: Share, listener: GradientListener, losses: list[Tensor]) -> None:
        following, self.following = self._later(), ()
        if not share:
            return
        leaves, batches = [leaf for leaf, _ in share], [batch for _, batch in share]
        if any(a is not b for a, b in zip(self._under_way.batches, batches, strict=False)):
            self.forget()  # microbatches that were computed once are computed again
        under_way, before = self._under_way, len(self._under_way.batches)
        self._under_way = UnderWay()  # of no use, should this fail
        window = step_window(
            self._schedule, self._inner.ranks, len(batches), before, len(following)
        )
        under_way.batches = [*batches, *following]
        losses += [under_way.losses.pop(m) for m in range(len(batches)) if m in under_way.losses]
        work = WindowWork(
            self._inner.only_stage,
            self._inner.boundary,
            self.weights,
            leaves,
            under_way.batches,
            listener,
            under_way,
            losses,
        )
        work.give_early_gradients()
        self._inner.interpreter.run(window, work, under_way.carried)
        self.weights.end_step(len(batches), bool(following))
        self._under_way = under_way.after(len(batches))

    def evaluate(self, batches: Sequence[Any], on_progress: Callable[[], None]) -> list[Tensor]:
        self.weights.use_newest()
        return self._inner.evaluate(batches, on_progress)

    def _later(self) -> list[Any]:
        """What this window may take. With two versions of the weights, the next step alone: a
        version more would be needed for the step after it."""
        steps = self.following[:1] if self._schedule == "pipedream-2bw" else self.following
        return [batch for step in steps for batch in step][: self.look_ahead()]


def overlap_steps(
    config: RunConfig,
    executor: Executor,
    parameters: Parameters,
    named: Callable[[], Mapping[str, Tensor]],
) -> tuple[Executor, Parameters]:
    """Let what the module of a pipeline computes with be versions. parameters: the rank's; what
    they refresh is where versions come from."""
    if not (isinstance(executor, PipelinedExecutor) and executor.is_overlapping):
        return executor, parameters
    schedule = config.layout.schedule
    weights = WeightVersions(list(named().values()), schedule)
    gather = parameters.update_compute_tensors

    def update() -> None:
        gather()
        weights.update()

    overlapping = AsynchronousExecutor(executor, schedule, weights)
    return overlapping, replace(parameters, update_compute_tensors=update)


def with_later_shares(feed: StepFeed, executor: AsynchronousExecutor) -> Iterator[StepShare]:
    """The shares of a generation, one by one. The executor gets those that follow, and begins with
    an empty pipeline."""
    executor.forget()
    waiting: deque[StepShare] = deque()
    shares = iter(feed)
    for share in shares:
        waiting.append(share)
        while waiting:
            behind, ahead = list(waiting)[1:], executor.look_ahead()
            if sum(len(later.microbatches) for later in behind) < ahead > len(behind):
                break
            yield _told(waiting, executor)
    while waiting:
        yield _told(waiting, executor)


def _told(waiting: deque[StepShare], executor: AsynchronousExecutor) -> StepShare:
    share = waiting.popleft()
    executor.following = [later.microbatches for later in waiting]
    return share


def follow_movement(config: RunConfig, engine: StepEngine) -> None:
    """Give the executor later shares. Let PipeMare's optimizer follow the movement of the weights,
    and backwards use it."""
    groups, layout, executor = engine.groups, config.layout, engine.executor
    if isinstance(executor, AsynchronousExecutor):
        engine.order_shares = partial(with_later_shares, executor=executor)
    if not layout.keeps_velocity:
        return
    stage = StageDelay(
        groups.degree("pp"),
        groups.coordinate.pp,
        lambda: engine.groups.replica_count,
        layout.pipemare_steps or max(1, config.train.steps // 4),
        layout.pipemare_decay,
    )
    engine.optimizer = Pipemare(engine.optimizer, engine.parameters.master_tensors, stage)
    if isinstance(executor, AsynchronousExecutor):
        executor.weights.velocity = engine.optimizer.velocity


APPLY = Apply(executor=overlap_steps, engine=follow_movement)
