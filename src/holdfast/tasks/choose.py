"""What the run file names, ready for the engine: the built-in decoder, its adapters, or a user's
task."""

from __future__ import annotations

from pathlib import Path

import torch

from holdfast.config.run import RunConfig
from holdfast.data.order.audit import AuditedBatches
from holdfast.data.stream.batch import Batches
from holdfast.data.stream.dataset_location import open_dataset
from holdfast.data.stream.verify import find_problems
from holdfast.errors import TaskError
from holdfast.tasks.named.named import load_user_parts
from holdfast.tasks.script import Script, load_run_task
from holdfast.tasks.scripts.script_engine import ScriptEngineTask
from holdfast.tasks.task.ask import describe_task
from holdfast.tasks.task.batches import TaskBatches
from holdfast.tasks.task.loading import source_digest
from holdfast.tasks.task.own import OwnTask
from holdfast.tasks.task.task import Task
from holdfast.training.engine.task import DecoderTask, EngineTask, OpenBatches


def open_task(config: RunConfig, device: torch.device | str = "cpu") -> EngineTask:
    """Return what is trained; a script is run up to its loop. device: where it is trained.

    Raises UserError for a task, an optimizer or a schedule that cannot be made, or whose source
    is not the run's."""
    task = _load_same(config, device) if config.task.name else None
    if isinstance(task, Script):
        return ScriptEngineTask(task, config)
    user, source = load_user_parts(config), open_source(config)
    if task is not None:
        return OwnTask(task, config, user)
    if not config.lora.rank:
        return DecoderTask(config, user, source)
    from holdfast.training.engine.lora_task import (
        LoraTask,  # only if needed: it reads folders of models
    )

    return LoraTask(config, user, source)


def open_source(config: RunConfig) -> OpenBatches | None:
    """Return what opens the decoder's batches; None: its token dataset has them."""
    if config.rollout.is_on:
        from holdfast.rollout.roles.batches import RolloutBatches

        return lambda dataset: RolloutBatches(config)
    return None


def open_audited(config: RunConfig, dataset: str | Path) -> tuple[AuditedBatches, list[str]]:
    """Return a run's batches, and what is wrong with the files of its data. dataset: the location
    of the prepared dataset. Raises UserError."""
    if config.rollout.is_on:
        from holdfast.rollout.roles.batches import RolloutBatches

        return RolloutBatches(config), []
    if config.task.has_own_data:
        return TaskBatches(_load_same(config), config), []
    opened = open_dataset(dataset, config.data)
    key = config.objective.reference.key
    batches = Batches(opened, config.data, config.step_train, config.seed, reference=key)
    return batches, find_problems(opened)


def _load_same(config: RunConfig, device: torch.device | str = "cpu") -> Task:
    """Load the run's task. Raises TaskError if its source is not the run's.

    A script may have imported more of the task's folder than the task does. So a process that
    imports the task alone decides."""
    task, source = load_run_task(config, device), config.task.source
    if source_digest(config.task, task) != source and describe_task(config)["source"] != source:
        raise TaskError(
            f"the source of {config.task.label} has changed since this run was started",
            remedy=f"put the files back, or begin another run: {config.task.other_run_command}",
        )
    return task
