"""Copies of hot experts on other ranks of `ep`: `layout.expert_replicas: auto`.

The choices of each microbatch decide which experts get copies, and nothing else. So a run that was
killed, restored or rebuilt makes the same copies, and no rank has to remember any. (He et al. 2022,
section 5.1, decide for each batch in this way.) All ranks
know them: they gather their numbers of choices, n - 1 times E int64 a forward pass and block. If a
rank's load is too high, it sends the matrices of its hottest expert to the rank with the lowest
one. That rank computes a part of the expert's rows, and no optimizer and no checkpoint knows of it.

In the backward pass the host sends the gradient of its copy back. The owner adds up those of all
hosts, in the order of ranks, and autograd adds the owner's own. So the owner has the complete
gradient before FSDP2 or a reducer sees it. A copy changes nothing but the rounding of that sum.

With experts of inner dim F, a copy costs 3 D F / tp elements in the forward pass and as many in the
backward. In between its host's memory holds them. A block that is run again sends the matrices once
more. Rows that their own rank computes need not travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from holdfast.model.experts import Experts, Matrices, permute
from holdfast.options.protocols import Apply
from holdfast.parallel.axes.expert_parallel import ExpertExchange
from holdfast.parallel.comm.comm_stats import TrafficCounter

LEAST_PART = 8
"""A copy takes at least 1/8 of an even load off a rank."""


@dataclass(frozen=True)
class ExpertCopy:
    """Rows of an expert that another rank computes. rows: by the rank whose tokens they are; they
    are the last ones of that rank for this expert that no earlier copy has."""

    expert: int
    host: int
    rows: tuple[int, ...]


def owner_of(expert: int, experts: int, ranks: int) -> int:
    """The rank that has an expert."""
    return expert // (experts // ranks)


def rank_loads(counts: Sequence[Sequence[int]]) -> list[int]:
    """Choices that each rank would compute without copies. counts: by rank, and by expert."""
    ranks, experts = len(counts), len(counts[0])
    of_expert = [sum(column) for column in zip(*counts, strict=True)]
    local = experts // ranks
    return [sum(of_expert[rank * local : (rank + 1) * local]) for rank in range(ranks)]


def plan_copies(counts: Sequence[Sequence[int]]) -> tuple[ExpertCopy, ...]:
    """Return the copies, at most one a host. counts: choices by rank, and by expert.

    n ranks have E / n experts each, in order. A rank's load is the choices that it computes. In
    each round the rank with the highest load gives rows of its hottest expert away. They go to the
    rank with the lowest load that has no copy yet, until both loads are equal or no row is left.
    The rounds end when that is less than a part of an even load (`LEAST_PART`). Without such a
    bound, every small difference would send an expert's matrices.
    """
    ranks, local = len(counts), len(counts[0]) // len(counts)
    left, loads = [list(row) for row in counts], rank_loads(counts)
    even, free = sum(loads) / ranks, set(range(ranks))
    found: list[ExpertCopy] = []
    while True:
        busiest = max(range(ranks), key=lambda rank: (loads[rank], -rank))
        host = min(free - {busiest}, key=lambda rank: (loads[rank], rank), default=None)
        if host is None:
            return tuple(found)
        own = range(busiest * local, (busiest + 1) * local)
        rows_of = {expert: sum(row[expert] for row in left) for expert in own}
        hottest = max(own, key=lambda expert: (rows_of[expert], -expert))
        moved = min(rows_of[hottest], (loads[busiest] - loads[host]) // 2)
        if moved * LEAST_PART < even or not moved:
            return tuple(found)
        rows = _take(left, hottest, moved, host)
        loads[busiest] -= moved
        loads[host] += moved
        free.remove(host)
        found.append(ExpertCopy(hottest, host, rows))


def _take(left: list[list[int]], expert: int, moved: int, host: int) -> tuple[int, ...]:
    """Take rows of an expert for a host: its own tokens first, since they need not travel."""
    rows = [0] * len(left)
    for rank in (host, *(rank for rank in range(len(left)) if rank != host)):
        rows[rank] = min(left[rank][expert], moved)
        left[rank][expert] -= rows[rank]
        moved -= rows[rank]
    return tuple(rows)


@dataclass(frozen=True)
class Dispatch:
    """The ranks that one rank's sorted choices go to in a microbatch. came: of each rank, rows for
    each expert of this rank, and then for its copy if it has one."""

    copies: tuple[ExpertCopy, ...]
    order: tuple[tuple[int, int], ...]  # places in the order of sending, as (first row, rows)
    sent: tuple[int, ...]  # rows to each rank
    came: tuple[tuple[int, ...], ...]
    lent: tuple[tuple[int, int], ...]  # (number here, host) of own experts with a copy, by host
    lender: int | None  # the owner of this rank's copy
    load: tuple[int, int, int]  # rows of an even load, of own experts, and that it computes


def plan_dispatch(counts: Sequence[Sequence[int]], rank: int) -> Dispatch:
    """counts: choices by rank, and by expert."""
    copies, ranks, experts = plan_copies(counts), len(counts), len(counts[0])
    local = experts // ranks
    hosted = {copy.host: copy for copy in copies}
    kept = [list(row) for row in counts]
    begin = (0, *accumulate(counts[rank]))  # of each expert's part, among my sorted choices
    begins: dict[int, int] = {}  # of a host's part there
    for copy in copies:
        for source in range(ranks):
            kept[source][copy.expert] -= copy.rows[source]
        begins[copy.host] = begin[copy.expert] + kept[rank][copy.expert]
    order: list[tuple[int, int]] = []
    sent: list[int] = []
    for to in range(ranks):
        own = range(to * local, (to + 1) * local)
        parts = [(begin[expert], kept[rank][expert]) for expert in own]
        if to in hosted:
            parts.append((begins[to], hosted[to].rows[rank]))
        order += parts
        sent.append(sum(rows for _, rows in parts))
    mine, copy_here = slice(rank * local, (rank + 1) * local), hosted.get(rank)
    came = tuple(
        (*kept[source][mine], *((copy_here.rows[source],) if copy_here else ()))
        for source in range(ranks)
    )
    lent = sorted(
        (copy.host, copy.expert - rank * local)
        for copy in copies
        if owner_of(copy.expert, experts, ranks) == rank
    )
    return Dispatch(
        copies,
        tuple(order),
        tuple(sent),
        came,
        tuple((expert, host) for host, expert in lent),
        owner_of(copy_here.expert, experts, ranks) if copy_here else None,
        (sum(map(sum, counts)) // ranks, rank_loads(counts)[rank], sum(map(sum, came))),
    )


class ReplicatingExchange(ExpertExchange):
    """An `ExpertExchange` of one block, which gives hot experts copies."""

    def __init__(self, group: dist.ProcessGroup, traffic: TrafficCounter | None = None):
        super().__init__(group, traffic)
        self._load = [0] * 4  # see `take_load`

    def __call__(self, experts: Experts, tokens: Tensor, counts: Tensor) -> Tensor:
        """See `ExpertExchange`."""
        # [E] -> [n, E]
        self.count(counts.nbytes * (self.size - 1))
        whole = counts.new_empty(self.size * counts.shape[0])
        dist.all_gather_into_tensor(whole, counts.contiguous(), group=self.group)
        plan = plan_dispatch(whole.view(self.size, -1).tolist(), self.rank)
        there = back = None
        if plan.copies:
            rows = [torch.arange(at, at + count) for at, count in plan.order]
            there = torch.cat(rows).to(tokens.device)
            back = there.argsort()
            tokens = permute(tokens, there, back)
        sent, received = list(plan.sent), [sum(row) for row in plan.came]
        arrived = self.travel(tokens, sent, received)
        came = torch.tensor(plan.came, device=tokens.device)
        of_expert = torch.arange(came.shape[1], device=came.device).repeat(self.size)
        order = of_expert.repeat_interleave(came.flatten()).argsort(stable=True)
        place = order.argsort()
        loan = Loan(self, plan)
        results = experts(permute(arrived, order, place), came.sum(0).tolist(), loan)
        results = permute(results, place, order)
        out = self.travel(results, received, sent)
        return out if there is None or back is None else permute(out, back, there)

    def note_load(self, plan: Dispatch) -> None:
        """A microbatch is done."""
        found = (*plan.load, int(plan.lender is not None))
        self._load = [known + new for known, new in zip(self._load, found, strict=True)]

    def take_load(self) -> list[int]:
        """Return rows of an even load, of this rank's own experts, and that it computed, and its
        copies. They are of the backward passes since the last call."""
        load, self._load = self._load, [0] * 4
        return load


class Loan:
    """Matrices that owners send to hosts in one forward pass."""

    def __init__(self, ranks: ReplicatingExchange, plan: Dispatch) -> None:
        self._ranks, self._plan = ranks, plan

    def __call__(
        self, tokens: Tensor, own: Sequence[Matrices]
    ) -> tuple[Tensor, tuple[Matrices, ...]]:
        """own: matrices of this rank's experts -> (tokens, those of its copy, if it has one)

        The tokens pass through, so every rank sends gradients of copies before those of tokens.
        """
        lent = sorted({expert for expert, _ in self._plan.lent})
        flat = [matrix for expert in lent for matrix in own[expert]]
        shapes = [matrix.shape for matrix in own[0]]
        tokens, borrowed = _Lend.apply(tokens, self._ranks, self._plan, shapes, *flat)  # type: ignore[no-untyped-call]
        if self._plan.lender is None:
            return tokens, ()
        return tokens, (_split(borrowed, shapes),)


class _Lend(torch.autograd.Function):
    """The tokens unchanged, and the matrices of this rank's copy as rows of D: none without one."""

    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        ranks: ReplicatingExchange,
        plan: Dispatch,
        shapes: list[torch.Size],
        *lent: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.ranks, ctx.plan, ctx.shapes = ranks, plan, shapes
        ctx.set_materialize_grads(True)
        dim, ones = tokens.shape[1], tokens[:0]
        if not plan.copies:
            return tokens.view_as(tokens), ones.clone()
        rows = {
            expert: torch.cat([matrix.reshape(-1, dim) for matrix in lent[3 * i : 3 * i + 3]])
            for i, expert in enumerate(sorted({expert for expert, _ in plan.lent}))
        }
        sent = torch.cat([ones, *(rows[expert] for expert, _ in plan.lent)])
        return tokens.view_as(tokens), ranks.exchange(sent, *_parts(ranks, plan, shapes, dim))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, of_copy: Tensor) -> tuple[Any, ...]:
        ranks, plan, shapes = ctx.ranks, ctx.plan, ctx.shapes
        ranks.note_load(plan)
        if not plan.copies:
            return gradient, None, None, None
        parts, other_parts = _parts(ranks, plan, shapes, gradient.shape[1])
        came = ranks.exchange(of_copy, other_parts, parts)
        sums: dict[int, Tensor] = {}
        pieces = came.split([part for part in parts if part])
        for (expert, _), piece in zip(plan.lent, pieces, strict=True):
            sums[expert] = sums[expert] + piece if expert in sums else piece
        lent = [matrix for expert in sorted(sums) for matrix in _split(sums[expert], shapes)]
        return gradient, None, None, None, *lent


def _parts(
    ranks: ReplicatingExchange, plan: Dispatch, shapes: Sequence[torch.Size], dim: int
) -> tuple[list[int], list[int]]:
    """Rows of D that this rank sends to each rank, and that it gets from each."""
    rows = sum(shape.numel() for shape in shapes) // dim
    hosts = {host for _, host in plan.lent}
    return (
        [rows * (rank in hosts) for rank in range(ranks.size)],
        [rows * (rank == plan.lender) for rank in range(ranks.size)],
    )


def _split(rows: Tensor, shapes: Sequence[torch.Size]) -> Matrices:
    """Rows of D -> one expert's matrices"""
    dim = rows.shape[1]
    parts = torch.split(rows, [shape.numel() // dim for shape in shapes])
    gate, up, down = (part.reshape(shape) for part, shape in zip(parts, shapes, strict=True))
    return gate, up, down


APPLY = Apply(expert_exchange=ReplicatingExchange)
