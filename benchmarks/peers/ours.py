"""Holdfast's step engine, replicated or sharded, driven as `training/engine/runner.py` drives
it."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.peers.work import Bench, Work
from holdfast.config.run import RunConfig
from holdfast.config.sections.layout import LayoutConfig
from holdfast.data.stream.loader import TensorMicrobatch
from holdfast.layout import AXES, Layout, place_layout
from holdfast.parallel.axes.process_groups import connect
from holdfast.parallel.axes.replica_groups import ConnectSettings
from holdfast.training.engine.build import build_engine
from holdfast.training.engine.engine import StepEngine
from holdfast.training.engine.precision import same_products_on_any_threads
from holdfast.training.memory.malloc import keep_freed_memory

CPU = torch.device("cpu")


def run_config(
    work: Work, world: int, layout: Layout, zero: int = 3, schedule: str = "1f1b", **more: Any
) -> RunConfig:
    """The work as a run file. A rank's `microbatches` are parts of a logical microbatch each.
    more: of the layout."""
    model = work.config.model_dump()
    return RunConfig.model_validate(
        {
            "seed": work.seed,
            "device": "cpu",
            "model": model,
            "data": {"sequence_length": work.sequence},
            "layout": {"workers": world, "zero": zero, "schedule": schedule} | axes(layout) | more,
            "train": {
                "steps": 10**6,
                "batch_size": work.batch,
                "compile": work.compile,
                "microbatch_size": work.batch // work.microbatches // layout.dp_replicate,
                "optimizer": {
                    "learning_rate": work.learning_rate,
                    "betas": work.betas,
                    "eps": work.eps,
                    "weight_decay": work.weight_decay,
                    "clip_norm": work.clip_norm,
                },
                "schedule": {"kind": "constant", "warmup_steps": 0},
            },
        }
    )


def axes(layout: Layout) -> dict[str, Any]:
    """What the run file says of a layout."""
    return {
        "pp": layout.pp,
        "dp_shard": layout.dp_shard,
        "cp": layout.cp,
        "tp": layout.tp,
        "stages": layout.stages,
    }


def run(
    bench: Bench,
    pp: int = 1,
    shards: int = 1,
    tp: int = 1,
    cp: int = 1,
    zero: int = 3,
    schedule: str = "1f1b",
    cp_method: str = "allgather",
    ep: int = 1,
    copies: str = "off",
    zero2_reduce: str = "microbatch",
    sequence_parallel: bool = True,
) -> None:
    same_products_on_any_threads()  # as a worker does: its cost is ours
    keep_freed_memory()
    work = bench.work
    named = LayoutConfig(schedule=schedule)
    layout = Layout(
        dp_replicate=bench.world // (pp * shards * cp * tp),
        pp=pp,
        dp_shard=shards,
        cp=cp,
        tp=tp,
        stages=work.stages(pp * named.stages_a_worker) if pp > 1 else (),
        is_folded=named.is_folded and pp > 1,
    )
    more: dict[str, Any] = {"cp_method": cp_method, "ep": ep, "expert_replicas": copies}
    more |= {"zero2_reduce": zero2_reduce, "sequence_parallel": sequence_parallel}
    config = run_config(work, bench.world, layout, zero, schedule, **more)
    engine = engine_of(bench, config, layout, dist.FileStore(bench.meeting, bench.world))
    if work.skewed:
        skew(engine)
    bench.ready()
    for step in itertools.count(1):
        bench.done(train(engine, work, step))


def engine_of(bench: Bench, config: RunConfig, layout: Layout, store: dist.Store) -> StepEngine:
    """This rank's engine, with initial weights. store: one that all ranks of the bench have."""
    topology = place_layout(layout, 1, ("local",) * bench.world)
    settings = ConnectSettings(store, CPU, seconds=300, ep=config.layout.ep)
    engine = build_engine(config, connect(settings, topology, bench.rank), CPU)
    engine.initialise(bench.work.seed)
    return engine


def skew(engine: StepEngine) -> None:
    """Let most tokens of each block take expert 0."""
    held = engine.parameters
    for row, box, tensor in zip(held.table, held.boxes, held.master_tensors, strict=True):
        if row.name.endswith("router.choice_bias") and box.offsets[0] == 0 and tensor.numel():
            tensor[0] = 0.1
    held.refresh()


def train(engine: StepEngine, work: Work, step: int) -> float:
    """One step; returns the mean loss."""
    whole = work.tokens[(step - 1) % work.distinct]
    at = engine.groups.coordinate
    shards = engine.groups.topology.replicas[at.replica].mesh_shape[AXES.index("dp_shard")]
    size = engine.train.microbatch_size
    part = size // shards
    batches = []
    for index in engine.begin(step):
        mine = whole[index * size + at.dp_shard * part :][:part]
        inputs, targets = mine[:, :-1].contiguous(), mine[:, 1:].contiguous()
        batches.append(TensorMicrobatch(inputs, targets, None, [], targets.numel()))
    engine.compute(batches)
    verdict = engine.reduce()
    engine.apply(verdict)
    return verdict.mean_loss
