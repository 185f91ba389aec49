"""Holdfast's step engine, replicated or sharded, driven as `train/runner.py` drives it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.peers.work import Bench, Work
from holdfast.config.run import RunConfig
from holdfast.layout import Layout, place
from holdfast.parallel.groups import connect
from holdfast.train.build import build_engine
from holdfast.train.precision import same_products_on_any_threads


@dataclass(frozen=True)
class Samples:
    """A logical microbatch, or this shard's part of it."""

    inputs: Tensor
    targets: Tensor
    documents: Tensor | None
    tokens: int


def run_config(work: Work, world: int, shards: int, zero: int) -> RunConfig:
    """The work as a run file. A rank's `microbatches` are parts of a logical microbatch each."""
    replicas = world // shards
    model = work.config.model_dump()
    return RunConfig.model_validate({
        "seed": work.seed, "device": "cpu", "model": model,
        "data": {"sequence_length": work.sequence},
        "layout": {"workers": world, "dp_shard": shards, "zero": zero},
        "train": {
            "steps": 10**6, "batch_size": work.batch, "compile": work.compile,
            "microbatch_size": work.batch // work.microbatches // replicas,
            "optimizer": {
                "learning_rate": work.learning_rate, "betas": work.betas, "eps": work.eps,
                "weight_decay": work.weight_decay, "clip_norm": work.clip_norm,
            },
            "schedule": {"kind": "constant", "warmup_steps": 0},
        },
    })  # fmt: skip


def run(bench: Bench, shards: int, zero: int = 3) -> None:
    same_products_on_any_threads()  # as a worker does: its cost is ours
    work = bench.work
    config = run_config(work, bench.world, shards, zero)
    layout = Layout(dp_replicate=bench.world // shards, dp_shard=shards)
    topology = place(layout, 1, ("local",) * bench.world)
    store = dist.FileStore(bench.meeting, bench.world)
    device = torch.device("cpu")
    groups = connect(topology, bench.rank, store, device, seconds=300)
    engine = build_engine(config, groups, device)
    engine.initialise(work.seed)
    size, part = config.train.microbatch_size, config.train.microbatch_size // shards
    first = groups.coordinate.dp_shard * part
    bench.ready()
    for step in itertools.count(1):
        whole = work.tokens[(step - 1) % work.distinct]
        batches = []
        for index in engine.begin(step):
            mine = whole[index * size + first : index * size + first + part]
            inputs, targets = mine[:, :-1].contiguous(), mine[:, 1:].contiguous()
            batches.append(Samples(inputs, targets, None, targets.numel()))
        engine.compute(batches)
        verdict = engine.reduce()
        engine.apply(verdict)
        bench.done(verdict.mean_loss)
