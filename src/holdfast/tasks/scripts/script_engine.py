"""A script's loop as the engine sees it: a task whose passes the script runs
(`tasks/scripts/own_loop.py`), and its validation.

The evaluator deals the microbatches of a validation and sums by the fixed tree, as for other runs
(`training/engine/evaluate.py`). The script's function runs in the runner's thread, while the script
waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from holdfast.config.run import RunConfig
from holdfast.core.weights import read_weight
from holdfast.data.stream.loader import StepBatch
from holdfast.errors import TaskError
from holdfast.parallel.axes.process_groups import ProcessGroups
from holdfast.tasks.script import Script
from holdfast.tasks.scripts.own_loop import (
    ComputeShare,
    DataNamed,
    EndLoop,
    OpenStep,
    Run,
    ShareDone,
)
from holdfast.tasks.task.batches import (
    TaskBatches,
    TaskLoader,
    TaskMicrobatch,
    TaskValidation,
    refuse_random_samples,
)
from holdfast.tasks.task.module import (
    buffer_versions,
    changed_buffer,
    evaluation_mode,
    seed_generators,
)
from holdfast.tasks.task.own import OwnTask
from holdfast.tasks.task.task import Samples, stacked_batch
from holdfast.training.engine.executors import Executor, Share
from holdfast.training.engine.stage_work import GradientListener
from holdfast.training.engine.task import TaskBatchSource
from holdfast.training.optimizers.make_optimizer import UserParts


@dataclass
class ScriptPart:
    """A microbatch of the validation. tokens: its weight, once its loss is computed."""

    read: TaskMicrobatch
    run: Run
    tokens: float = 0

    def loss(self) -> Tensor:
        """Compute the loss sum. Raises TaskError, and what the script raises."""
        named, kept = self.run.named_validation, self.run.kept
        assert named is not None, "there are microbatches"
        buffers = buffer_versions(kept.module)
        seed_generators(self.read.key)
        found = named.loss({name: self.run._cast(t) for name, t in self.read.tensors.items()})
        loss, self.tokens = _checked(found)
        if name := changed_buffer(kept.module, buffers):
            raise TaskError(
                f"the function of run.validate() changes buffer {name}",
                where="run.validate",
                remedy="compute the loss alone in it: the module is in evaluation mode",
            )
        return loss.detach().to(torch.float64)


class ScriptValidation:
    """Evenly spread samples of the dataset of `run.validate`; none without one."""

    tokens: int | None = None  # the script says it with each loss

    def __init__(self, run: Run, samples: int, microbatch_size: int, seed: int) -> None:
        self._run, named = run, run.named_validation
        dataset = None if named is None else cast(Samples, named.dataset)
        collate = (named and named.collate) or stacked_batch
        read = TaskValidation(dataset, collate, lambda _: 0.0, samples, microbatch_size, seed)
        self._read, self.microbatches = read, read.microbatches
        self.bits_per_byte = read.bits_per_byte

    def part(self, index: int, part: int, parts: int, device: torch.device) -> ScriptPart:
        return ScriptPart(self._read.part(index, part, parts, device), self._run)


def compute_losses(
    module: nn.Module, parts: Sequence[ScriptPart], on_progress: Callable[[], None]
) -> list[Tensor]:
    """The loss sums, in evaluation mode and without gradients."""
    losses = []
    with evaluation_mode(module), torch.no_grad():
        for part in parts:
            on_progress()
            losses.append(part.loss())
    return losses


def _checked(found: Any) -> tuple[Tensor, float]:
    match found:
        case Tensor() as loss, given if loss.shape == ():
            weight = read_weight(given)
            if weight is not None:
                return loss, weight
    raise TaskError(
        f"the function of run.validate() returned {_described(found)}",
        where="run.validate",
        remedy="return the loss as a sum, a scalar, and its weight, a number from 0 on",
    )


def _described(found: Any) -> str:
    if isinstance(found, tuple):
        return f"({', '.join(map(_described, found))})"
    return f"shape {list(found.shape)}" if isinstance(found, Tensor) else repr(found)[:80]


@dataclass(frozen=True)
class ScriptMicrobatch:
    """A microbatch whose weight the script says with its loss. weights: of the open step."""

    step: int
    index: int
    read: TaskMicrobatch
    script: Script

    @property
    def entries(self) -> list[dict[str, Any]]:
        return self.read.entries

    @property
    def tokens(self) -> float:
        return self.script.open_weights.get(self.index, 0)


class ScriptFeed:
    """This worker's shares. Before each, the script gets a turn up to its `step.batches`."""

    def __init__(
        self,
        script: Script,
        batches: TaskBatches,
        open_loader: Callable[[], TaskLoader],
        first: int,
    ) -> None:
        self._script, self._batches, self._open, self._step = script, batches, open_loader, first
        self._loader = open_loader() if script.run._data is not None else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._loader is not None:
            self._loader.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StepBatch[ScriptMicrobatch]:
        _open_step(self._script, self._step)
        if self._loader is None:
            refuse_random_samples(self._batches, *self._batches.positions(self._step, 0))
            self._loader = self._open()
        share = next(self._loader)
        self._step += 1
        return StepBatch(
            share.step,
            [
                ScriptMicrobatch(share.step, int(read.entries[0]["microbatch"]), read, self._script)
                for read in share.microbatches
            ],
        )


class ScriptExecutor(Executor):
    """Lets the script run its passes."""

    def __init__(self, script: Script) -> None:
        super().__init__(lambda batch: batch.read.arguments)
        self._script = script

    def train(self, share: Share, listener: GradientListener, losses: list[Tensor]) -> None:
        leaves, batches = [leaf for leaf, _ in share], [batch for _, batch in share]
        if not self._script.awaits_share:  # a share is computed once more
            _open_step(self._script, batches[0].step)
        read = [batch.read for batch in batches]
        answer = self._script.give(ComputeShare(leaves, read, listener, losses, self.loss_scale))
        assert isinstance(answer, ShareDone), answer
        if answer.error is not None:
            raise answer.error

    def evaluate(
        self, batches: Sequence[ScriptPart], on_progress: Callable[[], None]
    ) -> list[Tensor]:
        """Raises ScriptError for what goes wrong in the script's function."""
        try:
            return compute_losses(self._script.run.kept.module, batches, on_progress)
        except Exception as error:
            raise self._script.error_of(error) from error


class ScriptEngineTask(OwnTask):
    """A user's script."""

    def __init__(self, script: Script, config: RunConfig) -> None:
        kept = script.run.kept.optimizers
        super().__init__(
            script, config, UserParts(rate=kept.rate, parts=kept.parts, options=kept.digest)
        )
        self._script = script
        self._buffers = script.run.kept.buffers

    def executor(
        self, objective: nn.Module, groups: ProcessGroups, dtype: torch.dtype, device: torch.device
    ) -> ScriptExecutor:
        return ScriptExecutor(self._script)

    def loader(
        self, batches: TaskBatchSource, share: Callable[[int], Sequence[int]], **where: Any
    ) -> ScriptFeed:
        own = cast(TaskBatches, batches)
        return ScriptFeed(
            self._script, own, lambda: TaskLoader(own, share, **where), int(where["first_step"])
        )

    def validation(self, batches: TaskBatchSource, samples: int) -> ScriptValidation:
        train, seed = self._config.train, self._config.seed
        return ScriptValidation(self._script.run, samples, train.microbatch_size, seed)

    def check_first_loss(
        self, objective: nn.Module, batches: TaskBatchSource, groups: ProcessGroups
    ) -> None:
        """The script computes its losses in its loop, and not before."""

    def finish(self, on_wait: Callable[[], None]) -> None:
        """Let the script run what comes after its loop. Raises ScriptError."""
        on_wait()
        self._script.check_end(self._script.turns.give(EndLoop(), on_wait))


def _open_step(script: Script, step: int) -> None:
    """Let the script run to its `step.batches`, unless it waits there. Raises ScriptError."""
    if script.awaits_share and script.run._open_step == step:
        return
    answer = script.give(OpenStep(step))
    assert isinstance(answer, DataNamed), answer  # `Step.apply` refuses to come first
