"""Expert parallelism by hand: all_to_all_single with uneven splits, tokens sorted by expert, a loop
over local experts. FSDP2 shards everything else. Fused AdamW; clipping by the norm over all ranks.

Each rank owns its experts outright, so nothing of them is gathered. Their gradient comes back with
the tokens, as a sum over the ranks' losses. FSDP2 takes the mean, so the sum is divided, too.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.peers.work import Bench, blocks_of, compiled


class Travel(torch.autograd.Function):
    """Rows to the ranks of their experts, or back; gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, parts: list[int], other_parts: list[int]) -> Tensor:
        ctx.parts, ctx.other_parts = parts, other_parts
        out = rows.new_empty(sum(other_parts), rows.shape[1])
        dist.all_to_all_single(out, rows, other_parts, parts)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        gradient = gradient.contiguous()
        out = gradient.new_empty(sum(ctx.parts), gradient.shape[1])
        dist.all_to_all_single(out, gradient, ctx.parts, ctx.other_parts)
        return out, None, None


class Matrix(nn.Module):
    """One matrix of each local expert."""

    def __init__(self, whole: Tensor, rank: int, world: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(whole.chunk(world)[rank].clone())


class ExpertLayer(nn.Module):
    """A feed-forward whose experts are spread over all ranks. Parameters keep their names."""

    def __init__(self, original: Any, rank: int, world: int) -> None:
        super().__init__()
        self.router, self.world = nn.Module(), world
        self.router.weight = nn.Parameter(original.router.weight.detach().clone())
        names = ("gate", "up", "down")
        self.experts = nn.ModuleDict(
            {n: Matrix(getattr(original.experts, n).weight.detach(), rank, world) for n in names}
        )
        self.count, self.top_k = original.config.count, original.config.top_k

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, S, D]"""
        tokens = x.flatten(0, 1)
        scores = F.linear(tokens, self.router.weight).softmax(-1)  # type: ignore[arg-type]
        weights, chosen = scores.topk(self.top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        sent = torch.bincount(chosen.flatten(), minlength=self.count)
        came = torch.empty_like(sent)
        dist.all_to_all_single(came, sent)
        by_rank = came.view(self.world, -1)
        parts, other_parts = (c.view(self.world, -1).sum(1).tolist() for c in (sent, came))
        rows = Travel.apply(tokens[order // self.top_k], parts, other_parts)  # type: ignore[no-untyped-call]
        pieces = rows.split(came.tolist())  # of each rank, of each local expert
        local = by_rank.shape[1]
        matrices = zip(*(m.weight.unbind(0) for m in self.experts.values()), strict=True)  # type: ignore[union-attr,operator]
        done = []
        for expert, (gate, up, down) in enumerate(matrices):
            mine = torch.cat(pieces[expert::local])
            done.append(F.linear(F.silu(F.linear(mine, gate)) * F.linear(mine, up), down))
        split = [d.split(by_rank[:, e].tolist()) for e, d in enumerate(done)]
        back = torch.cat([split[e][r] for r in range(self.world) for e in range(local)])
        results = Travel.apply(back, other_parts, parts)  # type: ignore[no-untyped-call]
        results = results * weights.flatten()[order, None]
        return torch.zeros_like(tokens).index_add_(0, order // self.top_k, results).view_as(x)


def clip(shared: list[nn.Parameter], experts: list[nn.Parameter], world: int, norm: float) -> None:
    """Take the mean of the experts' gradients, and clip by the norm of all gradients."""
    torch._foreach_div_([p.grad for p in experts if p.grad is not None], world)
    own, rest = (
        torch.nn.utils.get_total_norm([p.grad for p in some if p.grad is not None])
        for some in (experts, shared)
    )
    squares = own.square()
    dist.all_reduce(squares)
    assert isinstance(rest, DTensor)
    total = (squares + rest.full_tensor().square()).sqrt()
    for some in (shared, experts):
        torch.nn.utils.clip_grads_with_norm_(some, norm, total)


def run(bench: Bench) -> None:
    work = bench.work
    bench.join()
    model = work.decoder()
    blocks: list[Any] = blocks_of(model)
    for block in blocks:
        block.ffn = ExpertLayer(block.ffn, bench.rank, bench.world)
    compiled(model, work)
    experts = [p for block in blocks for p in block.ffn.experts.parameters()]
    for block in blocks:
        fully_shard(block, ignored_params=set(experts))
    root, norm = fully_shard(model, ignored_params=set(experts)), work.clip_norm
    own = {id(p) for p in experts}
    shared = [p for p in model.parameters() if id(p) not in own]
    optimizer = torch.optim.AdamW(
        [
            group | {"params": some}
            for group in work.groups(model)
            for is_own in (False, True)
            if (some := [p for p in group["params"] if (id(p) in own) == is_own])
        ],
        lr=work.learning_rate,
        betas=work.betas,
        eps=work.eps,
        fused=True,
    )

    def around(is_last: bool) -> AbstractContextManager[None]:
        root.set_requires_gradient_sync(is_last)
        return nullcontext()

    bench.train(
        model, optimizer, around=around, clip=lambda: clip(shared, experts, bench.world, norm)
    )
