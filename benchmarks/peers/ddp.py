"""A hand-written DDP loop: torch's DistributedDataParallel, fused AdamW, clipping."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.work import Bench, compiled, mean_loss


def run(bench: Bench) -> None:
    work = bench.work
    bench.join()
    model = DistributedDataParallel(compiled(work.decoder(), work))
    optimizer = work.adamw(model)
    bench.ready()
    for parts in bench.microbatches():
        total = torch.zeros(())
        for index, (inputs, targets) in enumerate(parts):
            last = index == len(parts) - 1
            with nullcontext() if last else model.no_sync():
                loss = mean_loss(model(inputs), targets) / len(parts)
                loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), work.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        bench.done(total)
