"""A feed-forward of experts: a router gives each token to `top_k` of them.

The router takes the softmax of its scores in at least float32, and the largest ones choose (Jiang
et al. 2024, section 2.1). DeepSeek-V3 (2024, section 2.1.2) takes sigmoids, and a bias enters the
choice alone. No choice is dropped without `capacity`. With it, an expert computes the first choices
of a microbatch, in the order of its tokens, and a dropped choice adds nothing.

Tokens are sorted by expert, in their own order inside each, so an expert computes one contiguous
part. bfloat16 has one grouped product for all experts, if their dims are multiples of 8; every
other dtype has a loop. The choice follows from the dtype and the shapes alone, so a run does not
change it.

Losses of the router are sums over tokens t, as the main loss is. The balance loss is count * sum
of f(e) * p(t, e) over t and experts e. The z loss is the sum of logsumexp(scores of t)^2.
Here p is the softmax, or the sigmoids over their sum. Of all choices in the complete microbatch,
the part f(e) fell on e (Fedus et al. 2021, section 2.2; Zoph et al. 2022, section 3.3). It is a
count, so ranks that share a microbatch add it up exactly. The losses add gradients and do not show
in the reported loss.

A bias of the choice takes the choices of a microbatch as its gradient. They add up over the batch
as gradients do, and the step moves each bias by `bias_rate` (Wang et al. 2024, algorithm 1). So
replicas keep the same bits, and a checkpoint has the bias as it has every parameter.

Shapes: T tokens, D model dim, E experts, k = top_k, F inner dim, N = T k choices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.config.sections.model import ExpertsConfig, ModelConfig
from holdfast.model.feed_forward import ACTIVATIONS, GatedFeedForward, Linear, Product

_GROUPED_MULTIPLE = 8  # elements of a row's alignment that the grouped product asks for


class Routing(NamedTuple):
    """The experts of a microbatch's tokens.

    experts, weights: of each token, largest first [T, k]. counts: choices by expert [E].
    scores: of each expert; ranked: by what they were chosen; shares: parts that add up to 1 [T, E].
    """

    experts: Tensor
    weights: Tensor
    counts: Tensor
    scores: Tensor
    ranked: Tensor
    shares: Tensor


class Router(Linear):
    """Scores of all experts for each token, and the choice."""

    def __init__(self, dim: int, experts: ExpertsConfig):
        super().__init__(dim, experts.count)
        self._config = experts
        self.product: Product = F.linear
        self.choice_bias = nn.Parameter(torch.empty(experts.count)) if experts.choice_bias else None

    def forward(self, input: Tensor) -> Routing:  # type: ignore[override]
        """input: [T, D]"""
        wide = torch.float64 if input.dtype == torch.float64 else torch.float32
        config, is_sigmoid = self._config, self._config.scores == "sigmoid"
        scores = self.product(input.to(wide), self.weight.to(wide))  # [T, E]
        parts = scores.sigmoid() if is_sigmoid else scores.softmax(-1)
        ranked = parts.detach()
        if self.choice_bias is not None:
            ranked = ranked + self.choice_bias.detach().to(wide)
        chosen = ranked.topk(config.top_k, dim=-1).indices  # [T, k]
        weights = parts.gather(1, chosen)
        if config.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + (1e-20 if is_sigmoid else 0.0))
        if config.scale != 1.0:
            weights = weights * config.scale
        counts = torch.bincount(chosen.flatten(), minlength=scores.shape[1])
        shares = parts / parts.sum(-1, keepdim=True) if is_sigmoid else parts
        return Routing(chosen, weights, counts, scores, ranked, shares)


class ExpertMatrices(nn.Module):
    """One matrix of each expert, in one parameter [E, outputs, inputs]."""

    def __init__(self, count: int, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, outputs, inputs))


Matrices = tuple[Tensor, Tensor, Tensor]
"""(gate [F, D], up [F, D], down [D, F]) of one expert"""

Borrow = Callable[[Tensor, Sequence[Matrices]], tuple[Tensor, Sequence[Matrices]]]
"""(tokens, this rank's experts) -> (the same tokens, experts of other ranks)"""


class Experts(nn.Module):
    """Gated feed-forwards next to each other: those that this rank computes."""

    def __init__(self, count: int, dim: int, inner: int, activation: str):
        super().__init__()
        self.gate = ExpertMatrices(count, dim, inner)
        self.up = ExpertMatrices(count, dim, inner)
        self.down = ExpertMatrices(count, inner, dim)
        self.activation = ACTIVATIONS[activation]

    def forward(
        self, tokens: Tensor, counts: Sequence[int], borrow: Borrow | None = None
    ) -> Tensor:
        """tokens: [N, D], those of the first expert first; counts: of each expert -> [N, D]
        borrow: adds experts of other ranks, whose tokens come last."""
        own: Sequence[Matrices] = list(
            zip(*(each.weight.unbind(0) for each in (self.gate, self.up, self.down)), strict=True)
        )
        borrowed: Sequence[Matrices] = ()
        if borrow is not None:
            tokens, borrowed = borrow(tokens, own)
        parts, results = torch.split(tokens, list(counts)), list[Tensor]()
        if tokens.shape[0] and _has_grouped_product(tokens.dtype, *own[0][0].shape):
            here = tokens[: sum(counts[: len(own)])] if borrowed else tokens
            results.append(self._at_once(here, counts[: len(own)]))
            parts, own = parts[len(own) :], ()
        for x, (gate, up, down) in zip(parts, (*own, *borrowed), strict=True):
            inner = self.activation(F.linear(x, gate)) * F.linear(x, up)
            results.append(F.linear(inner, down))
        return torch.cat(results) if len(results) > 1 else results[0]

    def _at_once(self, tokens: Tensor, counts: Sequence[int]) -> Tensor:
        """All experts of this rank by grouped products.  [N, D] -> [N, D]"""
        ends = torch.tensor(counts, device=tokens.device).cumsum(0).to(torch.int32)
        gate, up, down = self.gate.weight, self.up.weight, self.down.weight
        inner = self.activation(_grouped(tokens, gate, ends)) * _grouped(tokens, up, ends)
        return _grouped(inner, down, ends)


RunExperts = Callable[[Experts, Tensor, Tensor], Tensor]
"""(experts, tokens [N, D] sorted by expert, counts [E]) -> their results [N, D]"""

GatherCounts = Callable[[Tensor], tuple[Tensor, int]]
"""choices by expert [E] -> (those of each rank [n, E], number of this rank)"""


class _Kept(NamedTuple):
    """Choices that are computed. rows: among the sorted ones; None: all. counts: by expert [E].
    dropped: how many are not [1]."""

    rows: Tensor | None
    counts: Tensor
    dropped: Tensor


class RoutedFeedForward(nn.Module):
    """Takes the place of the dense feed-forward.

    gather_counts: choices on each rank that shares a microbatch, in the order of its tokens, and
        this rank's number among them. answers_for_tokens: False on a rank whose twin, with the same
        tokens, adds the router's losses and counts choices. run_experts: computes them, here or on
        other ranks. take_load: rows of an even load, of this rank's experts, and that it computed,
        and copies that it had; nothing if there are none.
    """

    def __init__(self, model: ModelConfig, config: ExpertsConfig):
        super().__init__()
        width = config.width or model.ffn_dim
        self.config = config
        self.router = Router(model.dim, config)
        self.experts = Experts(config.count, model.dim, width, model.activation)
        inner = width * config.shared
        self.shared = GatedFeedForward(model.dim, inner, model.activation) if inner else None
        self.gather_counts: GatherCounts = lambda counts: (counts[None], 0)
        self.answers_for_tokens = True
        self.run_experts: RunExperts = lambda experts, *given: experts(given[0], given[1].tolist())
        self.take_load: Callable[[], list[int]] = list  # of this rank, where copies may change it
        self._counts: Tensor | None = None  # [E + 1]: the last number is of dropped choices

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, S, D] -> [B, S, D]"""
        tokens = x.flatten(0, 1)
        routing = self.router(tokens)
        order = routing.experts.flatten().argsort(stable=True)  # [N]
        place = order.argsort()  # of each choice
        kept = _Kept(None, routing.counts, routing.counts.new_zeros(1))
        if self.config.capacity and torch.is_grad_enabled():
            kept = self._keep(routing.counts, tokens.shape[0])
        sorted_tokens = _SortTokens.apply(tokens, order, place)  # type: ignore[no-untyped-call]
        if kept.rows is None:
            results = self.run_experts(self.experts, sorted_tokens, kept.counts)
        else:
            chosen = _Select.apply(sorted_tokens, kept.rows)  # type: ignore[no-untyped-call]
            results = self.run_experts(self.experts, chosen, kept.counts)
            results = _Restore.apply(results, kept.rows, order.shape[0])  # type: ignore[no-untyped-call]
        by_token = permute(results, place, order)
        weights = routing.weights.to(x.dtype)[..., None]  # [T, k, 1]
        out = (by_token.view(*routing.experts.shape, -1) * weights).sum(1)
        if torch.is_grad_enabled():
            out = self._with_gradients(out, routing, kept.dropped)
        out = out.view_as(x)
        return out if self.shared is None else out + self.shared(x)  # type: ignore[no-any-return]

    def _with_gradients(self, out: Tensor, routing: Routing, dropped: Tensor) -> Tensor:
        """Return `out`, whose backward pass gives the router what the main loss does not give. It
        counts choices too, as there is one for each microbatch, run again or not."""
        bias, loss, counts = self.router.choice_bias, None, routing.counts
        if self.answers_for_tokens and self.config.has_loss:
            loss = self._loss(routing)
        if bias is not None and not self.answers_for_tokens:
            counts = torch.zeros_like(counts)
        note = partial(self._count, torch.cat((routing.counts, dropped)))
        both: Tensor = _WithGradients.apply(out, loss, bias, counts, note)  # type: ignore[no-untyped-call]
        return both

    def exclude_from_compilation(self) -> None:
        """The blocks around are to be: the sizes of an expert's work are not for the compiler."""
        aside: Any = torch.compiler.disable
        self.forward = aside(self.forward)  # type: ignore[method-assign]

    def take_counts(self) -> tuple[list[int], int]:
        """Return (choices by expert, choices dropped) of the backward passes since the last call.
        Without any there are no experts."""
        counts, self._counts = self._counts, None
        *by_expert, dropped = [0] if counts is None else counts.tolist()
        return by_expert, dropped

    def _keep(self, counts: Tensor, tokens: int) -> _Kept:
        """What the capacity leaves of this rank's sorted choices. tokens: of this rank."""
        of_ranks, own = self.gather_counts(counts)
        even = of_ranks.shape[0] * tokens * self.config.top_k / self.config.count
        room = (math.ceil(self.config.capacity * even) - of_ranks[:own].sum(0)).clamp_min(0)  # [E]
        begin = counts.cumsum(0) - counts  # of each expert's part
        place = torch.arange(tokens * self.config.top_k, device=counts.device)
        place = place - begin.repeat_interleave(counts)
        rows = (place < room.repeat_interleave(counts)).nonzero()[:, 0]
        computed = torch.minimum(counts, room)
        return _Kept(rows, computed, (counts - computed).sum()[None])

    def _count(self, counts: Tensor) -> None:
        self._counts = counts if self._counts is None else self._counts + counts

    def _loss(self, routing: Routing) -> Tensor:
        """The router's losses, summed over these tokens: a scalar."""
        config = self.config
        loss = routing.scores.new_zeros(())
        if config.balance_loss:
            counts = self.gather_counts(routing.counts)[0].sum(0).to(loss.dtype)
            parts = counts / counts.sum()
            balance = config.count * (parts * routing.shares.sum(0)).sum()
            loss = loss + config.balance_loss * balance
        if config.z_loss:
            loss = loss + config.z_loss * routing.scores.logsumexp(-1).square().sum()
        return loss


def _has_grouped_product(dtype: torch.dtype, *dims: int) -> bool:
    return dtype == torch.bfloat16 and not any(dim % _GROUPED_MULTIPLE for dim in dims)


def _grouped(tokens: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """tokens: [N, inputs], matrices: [E, outputs, inputs] -> [N, outputs]"""
    grouped: Any = F.grouped_mm
    return grouped(tokens, matrices.transpose(1, 2), offs=ends)  # type: ignore[no-any-return]


def permute(rows: Tensor, there: Tensor, back: Tensor) -> Tensor:
    """rows[there]; `back` is the inverse permutation. Both are [N]."""
    return _Permute.apply(rows, there, back)  # type: ignore[no-any-return, no-untyped-call]


class _SortTokens(torch.autograd.Function):
    """A copy of each token for each of its choices, sorted. The gradient of a token is the sum over
    its choices, in their order: no scattered additions, which an accelerator makes in any order."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, place: Tensor) -> Tensor:
        """tokens: [T, D]; order, place: [N] -> [N, D]"""
        ctx.save_for_backward(place)
        ctx.rows = tokens.shape[0]
        return tokens[order // (order.shape[0] // ctx.rows)]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (place,) = ctx.saved_tensors
        return gradient[place].view(ctx.rows, -1, gradient.shape[1]).sum(1), None, None


class _Permute(torch.autograd.Function):
    """rows[there], with its gradient by `back`, the inverse permutation."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, there: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return rows[there]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return gradient[back], None, None


class _Select(torch.autograd.Function):
    """rows[kept], of which each is taken once."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, kept: Tensor) -> Tensor:
        ctx.save_for_backward(kept)
        ctx.rows = rows.shape[0]
        return rows[kept]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (kept,) = ctx.saved_tensors
        return _placed(gradient, kept, ctx.rows), None


class _Restore(torch.autograd.Function):
    """The inverse of `_Select`, with zeros for the rows that are missing."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, kept: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(kept)
        return _placed(rows, kept, count)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (kept,) = ctx.saved_tensors
        return gradient[kept], None, None


def _placed(rows: Tensor, places: Tensor, count: int) -> Tensor:
    """[n, D] -> [count, D]"""
    out = rows.new_zeros(count, rows.shape[1])
    out[places] = rows
    return out


class _WithGradients(torch.autograd.Function):
    """`out` unchanged. Its backward pass begins that of `loss` too, with 1. It gives `bias` the
    choices as its gradient, and calls `note`."""

    @staticmethod
    def forward(
        ctx: Any,
        out: Tensor,
        loss: Tensor | None,
        bias: Tensor | None,
        counts: Tensor,
        note: Callable[[], None],
    ) -> Tensor:
        ctx.note, ctx.loss = note, None if loss is None else torch.ones_like(loss)
        ctx.counts = None if bias is None else counts.to(bias.dtype)
        return out.view_as(out)

    @staticmethod
    def backward(
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None, None, None]:
        ctx.note()
        return gradient, ctx.loss, ctx.counts, None, None
