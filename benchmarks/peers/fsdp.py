"""FSDP2 by hand: `fully_shard` on each block and the root, fused AdamW, clipping."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.distributed.fsdp import fully_shard

from benchmarks.peers.work import Bench, blocks_of, compiled


def run(bench: Bench, zero: int = 3) -> None:
    """zero: 2 gathers parameters once a step, and keeps them for all of its microbatches."""
    work = bench.work
    bench.join()
    model = compiled(work.decoder(), work)
    for block in blocks_of(model):
        fully_shard(block, reshard_after_forward=zero == 3)
    root = fully_shard(model, reshard_after_forward=False)

    def around(is_last: bool) -> AbstractContextManager[None]:
        root.set_requires_gradient_sync(is_last)
        if zero == 2:
            root.set_reshard_after_backward(is_last)
        return nullcontext()

    bench.train(model, work.adamw(model), around=around)
