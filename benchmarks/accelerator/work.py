"""The engine that the rows of `benchmarks.gpu` time.

The engine is the one that a worker has, alone on its device. It computes on random tokens, so that
no data, agent or checkpoint enters a figure.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from holdfast.config.run import RunConfig
from holdfast.core.seeds import key_seed
from holdfast.layout import Layout, place_layout
from holdfast.parallel.process_groups import connect
from holdfast.train.build import build_engine
from holdfast.train.engine import StepEngine
from holdfast.train.vote import StepVerdict


@dataclass(frozen=True)
class Samples:
    """One microbatch of random tokens."""

    inputs: Tensor
    targets: Tensor
    documents: Tensor | None
    tokens: int


def wait_for(device: torch.device) -> None:
    """Return when all work given to the device is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def lone_engine(config: RunConfig, device: torch.device) -> StepEngine:
    """An engine without peers; its state is memory without values."""
    topology = place_layout(Layout(), 1, ("local",))
    with tempfile.NamedTemporaryFile(prefix="holdfast-meeting-") as meeting:
        groups = connect(topology, 0, dist.FileStore(meeting.name, 1), device, seconds=60)
    return build_engine(config, groups, device)


def one_step(engine: StepEngine, config: RunConfig, step: int) -> StepVerdict:
    """One step on tokens that are a function of the step and the microbatch."""
    size, length = config.train.microbatch_size, config.data.sequence_length
    batches = []
    for leaf in engine.begin(step):
        generator = torch.Generator().manual_seed(key_seed(7, "benchmark", step, leaf))
        vocabulary = config.model.vocab_size
        tokens = torch.randint(0, vocabulary, (size, length + 1), generator=generator)
        inputs = tokens[:, :-1].contiguous().to(engine.device)
        targets = tokens[:, 1:].contiguous().to(engine.device)
        documents = None
        if config.data.attention == "document":  # three in each sample
            row = torch.arange(length, dtype=torch.int32) * 3 // length
            documents = row.expand(size, length).contiguous().to(engine.device)
        batches.append(Samples(inputs, targets, documents, targets.numel()))
    engine.compute(batches)
    verdict = engine.reduce()
    engine.apply(verdict)
    return verdict


def trained(
    config: RunConfig, device: torch.device, steps: int
) -> tuple[list[float], dict[str, Tensor]]:
    """Train from the initial weights; the losses, and the state on the CPU."""
    engine = lone_engine(config, device)
    engine.initialise(config.seed)
    losses = [one_step(engine, config, step).mean_loss for step in range(1, steps + 1)]
    state = {local.name: local.tensor.detach().cpu().clone() for local in engine.state()}
    engine.close()
    return losses, state


def unequal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Sequence[str]:
    """Names of tensors that differ in any bit."""
    as_bytes = {name: t.contiguous().view(-1).view(torch.uint8) for name, t in one.items()}
    return [
        name
        for name, held in as_bytes.items()
        if not torch.equal(held, other[name].contiguous().view(-1).view(torch.uint8))
    ]
