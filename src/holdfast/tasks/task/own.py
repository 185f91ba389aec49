"""A user's task as the engine sees it (`training/engine/task.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from holdfast.config.run import RunConfig
from holdfast.config.sections.train import TrainConfig
from holdfast.core.sharding.boxes import Box
from holdfast.core.sharding.parameters import Parameter
from holdfast.core.sharding.run_table import run_parameters
from holdfast.data.prepare.dataset_match import needed_vocabulary
from holdfast.data.stream.dataset_location import open_dataset
from holdfast.errors import PeerLostError, TaskError
from holdfast.model.lora import set_base
from holdfast.parallel.axes.process_groups import ProcessGroups
from holdfast.parallel.torch_compat import is_peer_loss
from holdfast.tasks.task.batches import (
    BatchesOfTask,
    TaskBatches,
    TaskLoader,
    TaskMicrobatch,
    TaskValidation,
    TokenBatches,
    TokenTaskValidation,
    batch_weight,
    open_validation,
    refuse_random_samples,
)
from holdfast.tasks.task.initial import (
    first_adapter,
    first_values,
    frozen_values,
    is_adapter,
    refuse_other_values,
    trained_module,
)
from holdfast.tasks.task.loading import user_code
from holdfast.tasks.task.module import (
    TaskObjective,
    changed_buffer_error,
    evaluation_mode,
    merged_buffers,
    module_rows,
    names_outside,
    own_values,
    refuse_other_rows,
    set_buffers,
    table_shape,
    tie_again,
    tied_names,
    usable_units,
)
from holdfast.tasks.task.pipeline import TaskPipelinedExecutor, TaskStage, keep_stage, stage_rows
from holdfast.tasks.task.sharding import cut_module, refuse_wrong_table, sharding_rows
from holdfast.tasks.task.task import PipelineTask, Task
from holdfast.training.engine.evaluate import Validation
from holdfast.training.engine.executors import Executor, SingleStageExecutor
from holdfast.training.engine.precision import Precision
from holdfast.training.engine.protocols import ShareLoader
from holdfast.training.engine.state import InitialBox
from holdfast.training.engine.task import TaskBatchSource
from holdfast.training.optimizers.make_optimizer import UserParts

_EQUAL, _NEAR = 1e-3, 0.1
"""Relative distance within which two losses count as equal, without and with random numbers."""


@contextmanager
def _peer_loss_as_such() -> Iterator[None]:
    """A lost peer is no mistake in the user's code, where a collective may stand."""
    try:
        yield
    except (TaskError, RuntimeError) as error:
        cause = error.__cause__ if isinstance(error, TaskError) else error
        if isinstance(cause, RuntimeError) and is_peer_loss(cause):
            raise PeerLostError(f"a peer was lost before the first step: {cause}") from error
        raise


class TaskExecutor(SingleStageExecutor):
    """Runs a task's passes. A validation is computed in evaluation mode, without dropout."""

    def evaluate(self, batches: Sequence[Any], on_progress: Callable[[], None]) -> list[Tensor]:
        """Forward of each in evaluation mode; the loss sums. A part that does not count gives 0."""
        with evaluation_mode(self._objective):
            losses = super().evaluate(batches, on_progress)
        return [
            loss if batch.counts else torch.zeros_like(loss)
            for loss, batch in zip(losses, batches, strict=True)
        ]


class OwnTask:
    """A user's task. It keeps the module's constants, which each rebuild needs."""

    def __init__(self, task: Task, config: RunConfig, user_parts: UserParts | None = None) -> None:
        self._task, self._config = task, config
        self.user_parts = user_parts or UserParts()
        self._precision = Precision.of(config.train.precision)
        self._buffers: dict[str, Tensor] | None = None
        self._frozen: dict[str, Tensor] | None = None  # what adapters are for
        self._ties: list[list[str]] = []
        self._merged: tuple[str, ...] = ()
        self._table_names: dict[str, str] = {}  # of tied parameters, by their other names
        self._pipelined: TaskPipelinedExecutor | None = None

    def objective(self, groups: ProcessGroups) -> TaskObjective:
        """The module on the meta device. Raises TaskError if it does not fit the run's table."""
        module = trained_module(self._task, self._config.lora)
        refuse_other_rows(self._config.task.parameters, module_rows(self._task, module))
        merged = tuple(merged_buffers(self._task, module))
        axis = next((axis for axis in ("dp_shard", "tp", "pp") if groups.degree(axis) > 1), None)
        if merged and axis is not None:
            raise TaskError(
                f"buffer {merged[0]} is merged, and {axis} {groups.degree(axis)} cuts what it is "
                "computed from",
                remedy=f"use {axis} 1",
            )
        self._table_names = {n: first for first, *others in tied_names(module) for n in others}
        if groups.degree("pp") > 1:
            self._keep_stage(module, groups)
        if groups.degree("tp") > 1:
            refuse_other_rows(self._config.task.sharding, sharding_rows(self._task, module))
            cut_module(self._task, module, groups)
        units = usable_units(module, self._task.units(module))
        _refuse_without_units(self._config.train, module, units, merged)
        self._ties, self._merged = tied_names(module), merged
        cut = groups.degree("dp_shard") > 1 and self._config.layout.zero_in_memory > 1
        always = names_outside(module, units) if cut else []
        if not isinstance(self._task, PipelineTask):
            return TaskObjective(self._task, module, self._precision.compute, always)
        ends = groups.is_first_stage, groups.is_last_stage
        stage = TaskStage(self._task, *ends)
        made = TaskObjective(self._task, module, self._precision.compute, always, stage.run)
        made.is_last = stage.is_last
        return made

    def _keep_stage(self, module: nn.Module, groups: ProcessGroups) -> None:
        """Leave this rank's stage of a complete module. Raises TaskError."""
        task = self._task
        assert isinstance(task, PipelineTask), "the rules of the run file refuse other tasks"
        refuse_other_rows(self._config.task.positions, stage_rows(task, module)[1])
        blocks = groups.replica.blocks(groups.coordinate.pp) or ()
        keep_stage(task, module, blocks, groups.is_first_stage, groups.is_last_stage)

    def named_parameters(self, objective: nn.Module) -> dict[str, Tensor]:
        """The parameters, then the buffers that are merged, in the order of the table. (A stage may
        have a tied parameter under its other name alone.)"""
        found = _model(objective).named_parameters()
        named: dict[str, Tensor] = {
            self._table_names.get(name, name): parameter for name, parameter in found
        }
        named |= _own(objective).merged
        return {
            row.name: named[row.name] for row in run_parameters(self._config) if row.name in named
        }

    def units(self, objective: nn.Module) -> list[nn.Module]:
        model = _model(objective)
        return usable_units(model, self._task.units(model))

    def fill_constants(self, objective: nn.Module, device: torch.device) -> None:
        """Give the buffers their values, and tie what was tied."""
        model = _model(objective)
        tie_again(model, self._ties)
        if self._buffers is None:
            has_some = next(model.buffers(), None) is not None
            self._buffers = own_values(self._task, self._config.seed).buffers if has_some else {}
        self._set_frozen(model, device)
        with user_code("casts() failed"):
            kept = {n: b.dtype for n, b in self._buffers.items() if not self._task.casts(n)}
        dtypes = kept | dict.fromkeys(self._merged, self._precision.state)
        here = {name for name, _ in model.named_buffers(remove_duplicate=False)}
        values = {name: value for name, value in self._buffers.items() if name in here}
        set_buffers(model, values, device, self._precision.compute, dtypes)
        _own(objective).merged = {
            name: buffer.view(table_shape(buffer))
            for name in self._merged
            for buffer in (model.get_buffer(name),)
        }

    def _set_frozen(self, model: nn.Module, device: torch.device) -> None:
        """Give a module with adapters the values of its own parameters. Raises TaskError."""
        lora, compute = self._config.lora, self._precision.compute
        if not lora.rank:
            return
        if self._frozen is None:
            values = frozen_values(self._task, first_values(self._task, self._config.seed))
            refuse_other_values(values, lora.base_checksum)
            moved = {id(value): value.to(device, compute, copy=True) for value in values.values()}
            self._frozen = {name: moved[id(value)] for name, value in values.items()}
        set_base(model, self._frozen)

    def initial_values(self, seed: int) -> InitialBox:
        """The first values of the task's parameters, or of their adapters."""
        given = first_values(self._task, seed)

        def value(row: Parameter, box: Box) -> Tensor:
            adapts = self._config.lora.rank and is_adapter(row)
            answer = first_adapter(row, seed) if adapts else given(row)
            return answer[tuple(slice(a, b) for a, b in zip(box.offsets, box.stops, strict=True))]

        return value

    def executor(
        self, objective: nn.Module, groups: ProcessGroups, dtype: torch.dtype, device: torch.device
    ) -> Executor:
        self._pipelined = None
        if groups.degree("pp") == 1:
            return TaskExecutor(objective, groups.recorder, lambda batch: batch.arguments)
        assert isinstance(self._task, PipelineTask)
        where = groups, self._config.layout, dtype, device
        self._pipelined = TaskPipelinedExecutor(self._task, objective, *where)
        return self._pipelined

    def open_batches(self, dataset: str) -> BatchesOfTask:
        """The task's own data, or the prepared tokens. Raises UserError."""
        if self._config.task.has_own_data:
            return TaskBatches(self._task, self._config)
        opened = open_dataset(dataset, self._config.data)
        needed, known = needed_vocabulary(opened), self._task.vocabulary()
        if known is not None and needed > known:
            raise TaskError(
                f"the dataset has token ids up to {needed - 1}, and the model knows {known}",
                where="data.tokenizer.path",
                remedy="name the model's own tokenizer there, and another data.folder",
            )
        return TokenBatches(self._config, opened)

    def loader(
        self, batches: TaskBatchSource, share: Callable[[int], Sequence[int]], **where: Any
    ) -> ShareLoader:
        return TaskLoader(cast(BatchesOfTask, batches), share, **where)

    def validation(self, batches: TaskBatchSource, samples: int) -> Validation:
        """Of the task's own dataset, or of the prepared tokens. Raises TaskError."""
        seed = self._config.seed
        if isinstance(batches, TokenBatches):
            found = batches.tokens.validation(samples)
            return TokenTaskValidation(found, seed, self._config.data.chat.weights)
        return TaskValidation(
            open_validation(self._task),
            self._task.collate,
            partial(batch_weight, self._task),
            samples,
            self._config.train.microbatch_size,
            seed,
        )

    def read_step(self, dataset: str, step: int) -> list[dict[str, Tensor]]:
        batches = self.open_batches(dataset)
        count = batches.schedule.size(step) // batches.microbatch_size
        return [dict(batches.microbatch(step, index).tensors) for index in range(count)]

    @_peer_loss_as_such()
    def check_first_loss(
        self, objective: nn.Module, batches: TaskBatchSource, groups: ProcessGroups
    ) -> None:
        """Compute the first microbatch once and doubled. Raises TaskError for a loss that is a
        mean, and for all else that goes wrong there. Collective over a replica."""
        own = cast(BatchesOfTask, batches)
        part, parts = groups.coordinate.dp_shard, groups.degree("dp_shard")
        start, stop = own.positions(1, 0, part, parts)
        refuse_random_samples(own, start, stop)
        device = next(objective.parameters()).device
        buffers = {name: value.clone() for name, value in _model(objective).named_buffers()}
        found = [
            self._loss_of(objective, own.read_samples(start, stop, times), key, device)
            for times, key in ((1, 1), (1, 2), (2, 1))
        ]
        for name, value in _model(objective).named_buffers():
            if not torch.equal(value, buffers[name]):  # some kernels leave the version as it was
                raise changed_buffer_error(name)
        if None in found:  # the last stage has the loss
            return
        one, other, doubled = cast(list[float], found)
        near = _EQUAL if abs(one - other) <= _EQUAL * abs(one) else _NEAR
        if one and abs(doubled - one) <= near * abs(one):
            raise TaskError(
                f"the loss of a batch is {one:.6g}, and of the same samples twice {doubled:.6g}: "
                "it is a mean",
                remedy="return the sum, and let weight() return what to divide by",
            )
        if groups.degree("tp") > 1:
            first, _ = own.positions(1, 0)
            refuse_wrong_table(
                self._task,
                self._config,
                groups,
                _own(objective),
                self.named_parameters(objective),
                own.read_samples(first, first + 1),
                first_values(self._task, self._config.seed),
            )

    def finish(self, on_wait: Callable[[], None]) -> None:
        """Nothing is left to do."""

    def _loss_of(
        self, objective: nn.Module, batch: Mapping[str, Tensor], key: int, device: torch.device
    ) -> float | None:
        """None: another stage has it."""
        moved = {name: tensor.to(device) for name, tensor in batch.items()}
        microbatch = TaskMicrobatch(moved, key, [], 0)
        with torch.no_grad(), user_code("loss() failed for the first microbatch"):
            if self._pipelined is not None:
                loss = self._pipelined.first_loss(microbatch)
            else:
                loss = float(objective(*microbatch.arguments))
        for module in objective.modules():  # without a backward nothing else tells FSDP2 to
            reshard = getattr(module, "reshard", None)
            if reshard is not None:
                reshard()
        return loss


def _refuse_without_units(
    train: TrainConfig, module: nn.Module, units: Sequence[nn.Module], merged: Sequence[str]
) -> None:
    """Raises TaskError for a setting that needs units, or other units."""
    word, place = train.recompute_of(0, 1), train.memory.activations
    for is_set, what, instead in (
        (train.compile, "train.compile compiles the module's units", "train.compile=false"),
        (
            train.memory.moves_activations,
            f"train.memory.activations {place} moves what the module's units keep",
            "train.memory.activations=device",
        ),
        (
            train.recomputes,
            f"train.recompute {word} runs the module's units again",
            "train.recompute=none",
        ),
    ):
        if is_set and not units:
            raise TaskError(
                f"{what}, and it has none", remedy=f"name some in units(), or use {instead}"
            )
    if not train.recomputes:
        return
    changed = {id(module.get_buffer(name)): name for name in merged}
    for buffer in (buffer for unit in units for buffer in unit.buffers()):
        if name := changed.get(id(buffer)):
            raise TaskError(
                f"train.recompute {word} runs a unit again, which would change its "
                f"buffer {name} a second time",
                remedy="leave that unit out in units(), or use train.recompute=none",
            )


def _own(objective: nn.Module) -> TaskObjective:
    return cast(TaskObjective, objective)


def _model(objective: nn.Module) -> nn.Module:
    return _own(objective).model
