"""A hand-written DDP loop: torch's DistributedDataParallel, fused AdamW, clipping."""

from __future__ import annotations

from contextlib import nullcontext

from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.work import Bench, compiled


def run(bench: Bench) -> None:
    work = bench.work
    bench.join()
    model = DistributedDataParallel(compiled(work.decoder(), work))
    bench.train(
        model,
        work.adamw(model),
        around=lambda is_last: nullcontext() if is_last else model.no_sync(),
    )
