"""Floor of a step: the unavoidable work of every implementation, as a loop of its own in the same
run.

A rank does the matrix products of its own linear layers (forward, gradient of the input, gradient
of the weight). It does them at the layout's local shapes, into existing memory. It also does one
copy as large as half of what AdamW reads and writes (a copy reads and writes too). AdamW reads
parameter, gradient and both moments, and writes all but the gradient. No attention, no norms, no
softmax, no communication, no waiting for another stage.
"""

from __future__ import annotations

import itertools

import torch

from benchmarks.peers.work import Bench, Work
from holdfast.core.sharding.parameters import decoder_parameters

ADAMW_PASSES = 7  # reads and writes of 4 bytes per parameter


def run(bench: Bench, tp: int = 1, pp: int = 1) -> None:
    work = bench.work
    shapes = matrices(work, bench.rank, tp, pp)
    replicas = bench.world // (tp * pp)
    rows = work.batch // replicas // work.microbatches * work.sequence
    products = [
        (
            torch.randn(rows, k),
            torch.randn(n, k),
            torch.randn(rows, n),
            torch.empty(rows, n),
            torch.empty(rows, k),
            torch.empty(n, k),
        )
        for n, k in sorted(set(shapes))
    ]
    counts = [shapes.count(shape) for shape in sorted(set(shapes))]
    held = sum(n * k for n, k in shapes) // replicas  # what a shard's optimizer updates
    source = torch.randn(ADAMW_PASSES * held // 2)
    target = torch.zeros_like(source)
    bench.join()
    bench.ready()
    for _ in itertools.count():
        for _ in range(work.microbatches):
            for (x, weight, slope, y, dx, dw), count in zip(products, counts, strict=True):
                for _ in range(count):
                    torch.mm(x, weight.T, out=y)
                    torch.mm(slope, weight, out=dx)
                    torch.mm(slope.T, x, out=dw)
        target.copy_(source)
        bench.done(None)


def matrices(work: Work, rank: int, tp: int, pp: int) -> list[tuple[int, int]]:
    """[out, in] of each linear layer that this rank multiplies by, cut as tp cuts it."""
    stage = work.stage(rank // tp % pp, pp)
    names = [f"layers.{i}." for i in stage]
    names += ["head."] if stage.stop == work.config.layers else []
    cut_inside = ("attention.o.weight", "ffn.down.weight")
    return [
        (row.shape[0], row.shape[1] // tp)
        if row.name.endswith(cut_inside)
        else (row.shape[0] // tp, row.shape[1])
        for row in decoder_parameters(work.config)
        if len(row.shape) == 2 and row.name.startswith(tuple(names))
    ]
