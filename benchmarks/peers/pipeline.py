"""A pipeline by hand: torch's PipelineStage under 1F1B or GPipe, fused AdamW, clipping by the
norm over all stages. Shapes are given, so that nothing is exchanged to find them out."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from benchmarks.peers.parts import Parts
from benchmarks.peers.work import Bench, compiled, mean_loss

SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


def run(bench: Bench, schedule: str) -> None:
    work = bench.work
    bench.join()
    first, last = bench.rank == 0, bench.rank == bench.world - 1
    model = compiled(Parts(work.decoder(), work.stage(bench.rank, bench.world)), work)
    optimizer = work.adamw(model)
    count = work.microbatches
    shape = (work.batch // count, work.sequence)
    tokens = torch.empty(shape, dtype=torch.int64)
    residual = torch.empty(*shape, work.config.dim, requires_grad=True)  # else none is sent back
    logits = torch.empty(*shape, work.config.vocab_size, requires_grad=True)
    stage = PipelineStage(
        model,
        bench.rank,
        bench.world,
        torch.device("cpu"),
        input_args=(tokens if first else residual,),
        output_args=(logits if last else residual,),
    )

    def part_of_the_mean(out: Tensor, targets: Tensor) -> Tensor:
        return mean_loss(out, targets) / count

    made = SCHEDULES[schedule](stage, count, loss_fn=part_of_the_mean, scale_grads=False)
    bench.ready()
    for parts in bench.microbatches(replicas=1):
        losses: list[Tensor] = []
        inputs = [torch.cat([part[0] for part in parts])] if first else []
        targets = torch.cat([part[1] for part in parts]) if last else None
        made.step(*inputs, target=targets, losses=losses, return_outputs=False)
        clip(list(model.parameters()), work.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        bench.done(torch.stack(losses).sum().detach() if last else None)


def clip(parameters: list[torch.nn.Parameter], norm: float) -> None:
    """`clip_grad_norm_` over parameters that lie on different ranks, each on one."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    squares = torch.nn.utils.get_total_norm(gradients).square()
    dist.all_reduce(squares)
    torch.nn.utils.clip_grads_with_norm_(parameters, norm, squares.sqrt())
