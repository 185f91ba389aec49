"""FSDP2 by hand: `fully_shard` on each block and the root, fused AdamW, clipping."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import fully_shard

from benchmarks.peers.work import Bench, blocks_of, compiled, mean_loss


def run(bench: Bench, zero: int = 3) -> None:
    """zero: 2 gathers parameters once a step, and keeps them for all of its microbatches."""
    work = bench.work
    bench.join()
    model = compiled(work.decoder(), work)
    for block in blocks_of(model):
        fully_shard(block, reshard_after_forward=zero == 3)
    fully_shard(model, reshard_after_forward=False)
    optimizer = work.adamw(model)
    bench.ready()
    for parts in bench.microbatches():
        total = torch.zeros(())
        for index, (inputs, targets) in enumerate(parts):
            is_last = index == len(parts) - 1
            model.set_requires_gradient_sync(is_last)
            if zero == 2:
                model.set_reshard_after_backward(is_last)
            loss = mean_loss(model(inputs), targets) / len(parts)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), work.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        bench.done(total)
