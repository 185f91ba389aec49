"""Engines that train the tasks of `sample_tasks.py`, in the ranks of a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from holdfast.config.run import RunConfig
from holdfast.core.data.skips import Skip, Skips
from holdfast.layout import Topology, place_replicas
from holdfast.parallel.axes.process_groups import connect
from holdfast.parallel.axes.replica_groups import ConnectSettings
from holdfast.parallel.torch_compat import Store
from holdfast.tasks.child import describe
from holdfast.tasks.choose import open_task
from holdfast.tasks.task.batches import TaskBatches, open_samples
from holdfast.tasks.task.module import meta_module, module_rows
from holdfast.tasks.task.own import OwnTask
from holdfast.tasks.task.sharding import sharding_rows
from holdfast.tasks.task.task import Task
from holdfast.training.engine.build import build_engine
from holdfast.training.engine.engine import StepEngine
from holdfast.training.engine.replica_check import refuse_unequal_start
from tests.support.layouts import case, engine_of, pieces, save_pieces, topology_of
from tests.support.ranks import RankContext
from tests.support.tiny_training import CPU, digest

MODULE = "tests.support.sample_tasks"
ROOT = Path(__file__).resolve().parents[2]


def task_config(name: str, args: dict[str, Any] | None = None, **train: Any) -> RunConfig:
    """A run of one of the tasks: 6 microbatches of 4 samples a step, with clipping."""
    config = _unplanned(name, args, train)
    task = config.task.model_copy(update=_planned(config))
    return config.model_copy(update={"task": task})


def _unplanned(name: str, args: dict[str, Any] | None, train: dict[str, Any]) -> RunConfig:
    value = {
        "task": {"name": f"{MODULE}:{name}", "args": args or {}},
        "train": {
            "steps": 6,
            "batch_size": 24,
            "microbatch_size": 4,
            "optimizer": {"learning_rate": 0.01, "clip_norm": 0.05},
            "schedule": {"warmup_steps": 2},
        }
        | train,
        "layout": {"bucket_mb": 0.001},
    }
    return RunConfig.model_validate(value)


def _planned(config: RunConfig) -> dict[str, Any]:
    found = describe(config)
    return found | {key: tuple(found[key]) for key in ("parameters", "sharding", "positions")}


class TaskTraining:
    """One rank's engine and batches. Microbatch 1 of step 2 is skipped."""

    def __init__(self, config: RunConfig, layout: str, rank: int, store: Store) -> None:
        self.config = _with_changes(config, case(layout).changes)
        self.task = task = open_task(self.config)
        batches = task.open_batches("")
        assert isinstance(batches, TaskBatches)
        batches.skips = Skips([Skip(2, 1, "a skipped one")])
        self.batches = batches
        topology = topology_of(case(layout), self.config)
        self.engine: StepEngine = engine_of(self.config, topology, rank, store, task=task)
        task.check_first_loss(self.engine.objective, batches, self.engine.groups)

    def step(self, step: int) -> float:
        engine = self.engine
        part, parts = engine.groups.coordinate.dp_shard, engine.groups.degree("dp_shard")
        share = engine.begin(step)
        engine.compute([self.batches.microbatch(step, leaf, part, parts) for leaf in share])
        verdict = engine.reduce()
        engine.apply(verdict)
        return verdict.mean_loss

    def state(self) -> dict[str, np.ndarray]:
        return {t.name: t.tensor.detach().numpy().copy() for t in self.engine.state()}


def train_task(
    rank: RankContext,
    name: str,
    args: dict[str, Any] | None = None,
    layout: str = "one",
    steps: int = 6,
    to: str = "",
    **train: Any,
) -> list[str]:
    """Return the losses of the first steps, and the digest of the state. to: its pieces are written
    to a file that begins so. train: values of the section."""
    made = TaskTraining(task_config(name, args, **train), layout, rank.rank, rank.store())
    found = [made.step(step).hex() for step in range(1, steps + 1)] + [digest(made.engine)]
    if to:
        save_pieces(f"{to}-{rank.rank}.npz", pieces(made.engine))
    made.engine.close()
    return found


def topology_of_layout(layout: str) -> Topology:
    of = case(layout)
    return place_replicas(list(of.replicas), 1, ("node",) * of.world_size)


def _with_changes(config: RunConfig, changes: dict[str, Any]) -> RunConfig:
    layout = {key.removeprefix("layout__"): value for key, value in changes.items()}
    return config.model_copy(update={"layout": config.layout.model_copy(update=layout)})


def config_of_task(task: Task, **train: Any) -> RunConfig:
    """A run of a task that is an object of the test."""
    opened = open_samples(task)
    assert opened is not None
    samples, version = opened
    known = {"samples": len(samples), "data": version}
    config = _unplanned("Gru", None, train)
    module = meta_module(task)
    planned = {"parameters": module_rows(task, module), "sharding": sharding_rows(task, module)}
    planned |= known
    return config.model_copy(update={"task": config.task.model_copy(update=planned)})


def first_loss(task: Task, rank: RankContext, layout: str = "one") -> None:
    """Build the engine of a task and compute its first loss."""
    config = config_of_task(task)
    own = OwnTask(task, config)
    groups = connect(
        ConnectSettings(rank.store(), CPU, seconds=120), topology_of_layout(layout), rank.rank
    )
    engine = build_engine(config, groups, CPU, task=own)
    try:
        engine.initialise(1)
        batches = own.open_batches("")
        refuse_unequal_start(config, groups, engine.state())
        own.check_first_loss(engine.objective, batches, groups)
        engine.compute([batches.microbatch(1, leaf) for leaf in engine.begin(1)])
    finally:
        engine.close()
