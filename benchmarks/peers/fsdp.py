"""FSDP2 by hand: `fully_shard` on each block and the root, fused AdamW, clipping."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import fully_shard

from benchmarks.peers.work import Bench, blocks_of, compiled, mean_loss


def run(bench: Bench) -> None:
    work = bench.work
    bench.join()
    model = compiled(work.decoder(), work)
    for block in blocks_of(model):
        fully_shard(block)
    fully_shard(model)
    optimizer = work.adamw(model)
    bench.ready()
    for parts in bench.microbatches():
        total = torch.zeros(())
        for index, (inputs, targets) in enumerate(parts):
            model.set_requires_gradient_sync(index == len(parts) - 1)
            loss = mean_loss(model(inputs), targets) / len(parts)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), work.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        bench.done(total)
