"""DeepSpeed's engines on the CPU with torch's fused AdamW and their own clipping. These are ZeRO
stage 2 or 3, its pipeline (1F1B), and training with automatic tensor parallelism."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers.parts import Parts
from benchmarks.peers.work import Bench, MeanLoss, compiled, mean_loss


def run(bench: Bench, stage: int) -> None:
    """Data parallelism with sharded state."""
    join(bench)
    module = MeanLoss(compiled(bench.work.decoder(), bench.work))
    engine = engine_of(bench, module, bench.world, {"zero_optimization": {"stage": stage}})
    loop(bench, engine, bench.world)


class HookedLoss(nn.Module):
    """A decoder whose loss DeepSpeed replaces by its own over a sharded vocabulary."""

    def __init__(self, decoder: Parts):
        super().__init__()
        self.decoder = decoder
        self.loss_function = plain_loss

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """inputs, targets: [B, S] -> scalar"""
        return self.loss_function(self.decoder(inputs), shift_labels=targets)


def plain_loss(logits: Tensor, shift_labels: Tensor) -> Tensor:
    """What stands there until DeepSpeed puts its own in place."""
    return mean_loss(logits, shift_labels)


def tensor(bench: Bench) -> None:
    """AutoTP: the tensor parallelism that DeepSpeed trains with. The vocabulary of the head is
    sharded with the loss; every rank has all of the embedding, the norms and the tokens."""
    join(bench)
    module = HookedLoss(compiled(Parts(bench.work.decoder()), bench.work))
    rows = {"patterns": [r".*attention\.o\.weight$", r".*ffn\.down\.weight$"]}
    columns = {"patterns": [r".*attention\.[qkv]\.weight$", r".*ffn\.(gate|up)\.weight$"]}
    parallel = {
        "autotp_size": bench.world,
        "vocab_parallel_lm_head": True,
        "partition_config": {
            "use_default_specs": False,
            "lm_head_patterns": ["head"],
            "layer_specs": [
                rows | {"partition_type": "row"},
                columns | {"partition_type": "column"},
            ],
        },
    }
    config = {"zero_optimization": {"stage": 0}, "tensor_parallel": parallel}
    loop(bench, engine_of(bench, module, 1, config), 1)


def pipeline(bench: Bench, stage: int) -> None:
    """PipelineModule with one part of the decoder per stage; its engine schedules 1F1B."""
    join(bench)
    from deepspeed.pipe import PipelineModule

    work = bench.work
    decoder = work.decoder()
    parts = [Parts(decoder, work.stage(i, bench.world)) for i in range(bench.world)]
    module = PipelineModule(
        [compiled(part, work) for part in parts],
        num_stages=bench.world,
        loss_fn=mean_loss,
        partition_method="uniform",
    )
    engine = engine_of(bench, module, 1, {"zero_optimization": {"stage": stage}})
    batches = one_by_one(bench)
    bench.ready()
    while True:
        bench.done(engine.train_batch(batches))


def one_by_one(bench: Bench) -> Iterator[tuple[Tensor, Tensor]]:
    for parts in bench.microbatches(replicas=1):
        yield from parts


def join(bench: Bench) -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    bench.join()
    deepspeed.init_distributed(dist_backend="gloo")


def engine_of(bench: Bench, module: nn.Module, replicas: int, config: dict[str, Any]) -> Any:
    """Its engine around a module."""
    import deepspeed

    work = bench.work
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=work.adamw(module),
        config={
            "train_micro_batch_size_per_gpu": work.batch // replicas // work.microbatches,
            "gradient_accumulation_steps": work.microbatches,
            "gradient_clipping": work.clip_norm,
            "zero_allow_untested_optimizer": True,
        }
        | config,
    )
    return engine


def loop(bench: Bench, engine: Any, replicas: int) -> None:
    bench.ready()
    for parts in bench.microbatches(replicas):
        total = torch.zeros(())
        for inputs, targets in parts:
            loss = engine(inputs, targets)
            engine.backward(loss)  # divides by the number of microbatches
            engine.step()
            total += loss.detach() / len(parts)
        bench.done(total)
