"""Trains a small decoder twice on one device, without peers, and compares every bit.

    python -m holdfast.training.measure.equal_steps cuda

prints how many tensors there are and the names of those that differ, as JSON. `holdfast doctor`
runs it on a machine with an accelerator.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from holdfast.config.run import RunConfig
from holdfast.core.seeds import key_seed
from holdfast.data.stream.loader import TensorMicrobatch
from holdfast.layout import Layout, place_layout
from holdfast.parallel.axes.process_groups import connect
from holdfast.parallel.axes.replica_groups import ConnectSettings
from holdfast.parallel.comm.devices import select_device
from holdfast.training.engine.build import build_engine
from holdfast.training.engine.engine import StepEngine
from holdfast.training.engine.precision import same_kernels_each_time
from holdfast.training.engine.vote import StepVerdict
from holdfast.wire.process_end import skip_collections

STEPS = 2


def lone_engine(config: RunConfig, device: torch.device) -> StepEngine:
    """An engine without peers; its state is memory without values."""
    topology = place_layout(Layout(), 1, ("local",))
    with tempfile.NamedTemporaryFile(prefix="holdfast-meeting-") as meeting:
        store = dist.FileStore(meeting.name, 1)
        groups = connect(ConnectSettings(store, device, seconds=60), topology, 0)
    return build_engine(config, groups, device)


def one_step(engine: StepEngine, config: RunConfig, step: int) -> StepVerdict:
    """One step on tokens that are a function of the step and the microbatch."""
    size, length = config.train.microbatch_size, config.data.sequence_length
    rows = size // engine.groups.degree("dp_shard")
    batches = []
    for leaf in engine.begin(step):
        generator = torch.Generator().manual_seed(key_seed(7, "benchmark", step, leaf))
        vocabulary = config.model.vocab_size
        tokens = torch.randint(0, vocabulary, (size, length + 1), generator=generator)
        tokens = tokens[engine.groups.coordinate.dp_shard * rows :][:rows]
        inputs = tokens[:, :-1].contiguous().to(engine.device)
        targets = tokens[:, 1:].contiguous().to(engine.device)
        documents = None
        if config.data.attention == "document":  # three in each sample
            row = torch.arange(length, dtype=torch.int32) * 3 // length
            documents = row.expand(rows, length).contiguous().to(engine.device)
        batches.append(TensorMicrobatch(inputs, targets, documents, [], targets.numel()))
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


def unequal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    """Names of tensors that differ in any bit."""
    as_bytes = {name: t.contiguous().view(-1).view(torch.uint8) for name, t in one.items()}
    return [
        name
        for name, held in as_bytes.items()
        if not torch.equal(held, other[name].contiguous().view(-1).view(torch.uint8))
    ]


def compare_steps(device: torch.device) -> tuple[int, list[str]]:
    """Number of tensors of both precisions, and the names of those that differ."""
    count, odd = 0, list[str]()
    for precision in ("fp32", "bf16"):
        # A decoder with grouped heads.
        config = RunConfig.model_validate(
            {
                "device": device.type,
                "model": {
                    "preset": None,
                    "layers": 2,
                    "dim": 128,
                    "heads": 4,
                    "kv_heads": 2,
                    "ffn_dim": 256,
                    "vocab_size": 512,
                },
                "data": {"sequence_length": 128},
                "train": {"batch_size": 4, "microbatch_size": 2, "precision": precision},
            }
        )
        (_, one), (_, other) = (trained(config, device, STEPS) for _ in range(2))
        count += len(one)
        odd += [f"{name} in {precision}" for name in unequal(one, other)]
    return count, odd


def main() -> None:
    """Compare on the device that the command names."""
    skip_collections()
    device = torch.device(sys.argv[1])
    if device.type != "cpu":
        same_kernels_each_time(compiled=False)
        select_device(device)
    count, odd = compare_steps(device)
    print(json.dumps({"tensors": count, "unequal": odd}))


if __name__ == "__main__":
    main()
