"""A pipeline by hand: torch's PipelineStage under one of its schedules, fused AdamW, clipping by
the norm over all stages. Shapes are given, so that nothing is exchanged to find them out."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as theirs

from benchmarks.peers.parts import Parts
from benchmarks.peers.work import Bench, Work, compiled, mean_loss

SCHEDULES: dict[str, Any] = {
    "1f1b": theirs.Schedule1F1B,
    "gpipe": theirs.ScheduleGPipe,
    "interleaved": theirs.ScheduleInterleaved1F1B,
    "zb-h1": theirs.ScheduleInterleavedZeroBubble,  # with one stage a rank
    "zbv": theirs.ScheduleZBVZeroBubble,
    "dualpipev": theirs.ScheduleDualPipeV,
}


def run(bench: Bench, schedule: str) -> None:
    work, kind = bench.work, SCHEDULES[schedule]
    bench.join()
    numbers, stages = stages_of(schedule, bench.rank, bench.world)
    first, last = 0 in numbers, stages - 1 in numbers
    models = [compiled(Parts(work.decoder(), work.stage(n, stages)), work) for n in numbers]
    optimizer = work.adamw(nn.ModuleList(models))
    count = work.microbatches
    made_stages = [make_stage(work, m, n, stages) for m, n in zip(models, numbers, strict=True)]

    def part_of_the_mean(out: Tensor, targets: Tensor) -> Tensor:
        return mean_loss(out, targets) / count

    is_single = issubclass(kind, theirs.PipelineScheduleSingle)
    given = made_stages[0] if is_single else made_stages
    made = kind(given, count, loss_fn=part_of_the_mean, scale_grads=False)
    bench.ready()
    for parts in bench.microbatches(replicas=1):
        losses: list[Tensor] = []
        inputs = [torch.cat([part[0] for part in parts])] if first else []
        targets = torch.cat([part[1] for part in parts]) if last else None
        made.step(*inputs, target=targets, losses=losses, return_outputs=False)
        clip([p for model in models for p in model.parameters()], work.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        bench.done(torch.stack(losses).sum().detach() if last else None)


def stages_of(schedule: str, rank: int, world: int) -> tuple[list[int], int]:
    """The stages of a rank, and how many there are."""
    if schedule == "interleaved":
        return [rank, rank + world], 2 * world
    if schedule in ("zbv", "dualpipev"):
        return [rank, 2 * world - 1 - rank], 2 * world
    return [rank], world


def make_stage(work: Work, model: nn.Module, number: int, stages: int) -> PipelineStage:
    """One stage with its shapes."""
    shape = (work.batch // work.microbatches, work.sequence)
    tokens = torch.empty(shape, dtype=torch.int64)
    residual = torch.empty(*shape, work.config.dim, requires_grad=True)  # else none is sent back
    logits = torch.empty(*shape, work.config.vocab_size, requires_grad=True)
    return PipelineStage(
        model,
        number,
        stages,
        torch.device("cpu"),
        input_args=(residual if number else tokens,),
        output_args=(logits if number == stages - 1 else residual,),
    )


def clip(parameters: list[torch.nn.Parameter], norm: float) -> None:
    """`clip_grad_norm_` over parameters that lie on different ranks, each on one."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    squares = torch.nn.utils.get_total_norm(gradients).square()
    dist.all_reduce(squares)
    torch.nn.utils.clip_grads_with_norm_(parameters, norm, squares.sqrt())
