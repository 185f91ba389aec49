"""The `ep` axis: experts spread over ranks, and what ranks that share a microbatch agree on.

`ep` has no ranks of its own. Ranks along `dp_shard` and `cp` have different tokens. `ep` cuts them
in n = ep ranks with unlike experts, times ranks with the same ones (`expert_groups.py`).
Attention keeps its own axes. FSDP2 shards experts over the ranks that have the same ones, and all
else over dp_shard.

Each rank sends its sorted tokens to the ranks of their experts, and gets the results back. Each way
is an all-to-all of uneven parts (GShard: Lepikhin et al. 2020, section 3.1). In a forward pass a
rank sends a row of D elements for each of its choices that fell on an expert of another rank. It
sends one for each choice of another rank that fell on its own experts. A backward pass sends as
many. Numbers of choices are (n - 1) / n * experts int64 more in a forward pass.

Blocks that run again in the backward pass send once more what the forward pass sent. Under tp each
rank has a part of each expert's inner units and all tokens, so each of them sends this.

The balance loss and the capacity count the choices of a complete microbatch. Ranks along `dp_shard`
and `cp` have parts of it, so each block gathers the numbers of choices over them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from holdfast.model.decoder import Decoder
from holdfast.model.experts import ExpertMatrices, Experts, RoutedFeedForward, permute
from holdfast.parallel.axes.process_groups import ProcessGroups
from holdfast.parallel.comm.collectives import Collectives, with_gradient
from holdfast.parallel.comm.comm_stats import TrafficCounter, waiting


def routed_layers(decoder: Decoder) -> list[RoutedFeedForward]:
    """The feed-forwards of experts that are here, in order."""
    found = (block.ffn for block in decoder.layers)
    return [layer for layer in found if isinstance(layer, RoutedFeedForward)]


def shared_experts(objective: nn.Module, groups: ProcessGroups) -> list[nn.Module]:
    """The modules of experts, if other ranks have other ones."""
    if groups.expert_degree == 1:
        return []
    return [module for module in objective.modules() if isinstance(module, Experts)]


def share_counts(
    decoder: Decoder, groups: Sequence[dist.ProcessGroup], traffic: TrafficCounter | None = None
) -> None:
    """Let the routers know the choices of complete microbatches. groups: along each axis whose
    ranks have other tokens of the same microbatch, in the order of its tokens."""
    axes = [Collectives(group, traffic, kind="ep") for group in groups]

    def gathered(counts: Tensor) -> tuple[Tensor, int]:
        found, own = counts[None], 0
        for axis in axes:
            own += axis.rank * found.shape[0]
            found = axis.all_gather(found)
        return found, own

    for layer in routed_layers(decoder):
        layer.gather_counts = gathered


def apply_expert_parallel(
    decoder: Decoder, group: dist.ProcessGroup, make: Callable[[], ExpertExchange]
) -> None:
    """Compute the decoder's experts, or those of a stage, over the ranks of `group`. Call it on the
    meta device, after tp has cut the parameters: no values are kept. make: the exchange of a block.
    """
    for layer in routed_layers(decoder):
        layer.run_experts = exchange = make()
        layer.take_load = exchange.take_load
        for matrices in layer.experts.children():
            assert isinstance(matrices, ExpertMatrices)
            count, *rest = matrices.weight.shape
            made = matrices.weight.new_empty(count // exchange.size, *rest)
            matrices.weight = nn.Parameter(made)


class ExpertExchange:
    """Brings tokens to the ranks of their experts, and the results back."""

    def __init__(self, group: dist.ProcessGroup, traffic: TrafficCounter | None = None):
        self.group, self.size, self.rank = group, group.size(), group.rank()
        self._traffic = traffic

    def __call__(self, experts: Experts, tokens: Tensor, counts: Tensor) -> Tensor:
        """tokens: [N, D], sorted by expert; counts: [E] -> their results [N, D]"""
        sent = counts.view(self.size, -1)  # [n, E / n]
        came = self._exchange_counts(sent)  # from each rank, of my experts
        parts, other_parts = sent.sum(1).tolist(), came.sum(1).tolist()
        arrived = self.travel(tokens, parts, other_parts)
        of_expert = torch.arange(came.shape[1], device=came.device).repeat(self.size)
        order = of_expert.repeat_interleave(came.flatten()).argsort(stable=True)
        place = order.argsort()
        results = experts(permute(arrived, order, place), came.sum(0).tolist())
        back = permute(results, place, order)
        return self.travel(back, other_parts, parts)

    def take_load(self) -> list[int]:
        """Return nothing: every rank computes the rows of its own experts."""
        return []

    def travel(self, rows: Tensor, parts: list[int], other_parts: list[int]) -> Tensor:
        """`exchange`; gradients go the way back."""
        return with_gradient(
            rows,
            lambda rows: self.exchange(rows, parts, other_parts),
            lambda gradient: self.exchange(gradient, other_parts, parts),
        )

    def exchange(self, rows: Tensor, parts: list[int], other_parts: list[int]) -> Tensor:
        """The first parts[0] rows go to the first rank, and so on. -> what came, by rank"""
        rows = rows.contiguous()
        self.count((rows.shape[0] - parts[self.rank]) * rows[:1].nbytes if len(rows) else 0)
        came = rows.new_empty(sum(other_parts), *rows.shape[1:])
        with waiting(self._traffic, "ep", "tokens"):
            dist.all_to_all_single(came, rows, other_parts, parts, group=self.group)
        return came

    def _exchange_counts(self, sent: Tensor) -> Tensor:
        """[n, E / n] -> [n, E / n]"""
        self.count(sent.nbytes // self.size * (self.size - 1))
        came = torch.empty_like(sent)
        with waiting(self._traffic, "ep", "counts"):
            dist.all_to_all_single(came, sent.contiguous(), group=self.group)
        return came

    def count(self, nbytes: int) -> None:
        """Count bytes that leave this rank."""
        if self._traffic is not None:
            self._traffic.add("ep", nbytes)
