"""Context parallelism against one process: losses, gradients, documents, windows, bytes."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from holdfast.config.sections.model import ModelConfig
from holdfast.parallel.axes.context import ContextMethod, ContextParallel
from holdfast.parallel.axes.context_kernels import (
    FusedAttention,
    Keys,
    MergedAttention,
    PartialAttention,
    ScoresAttention,
)
from holdfast.parallel.axes.context_parts import TokenRelations, chunks_of, find_parts
from holdfast.parallel.comm.comm_stats import TrafficCounter
from holdfast.training.engine.objective import NextTokenObjective
from tests.runtime.parallel.test_tensor_parallel import SHAPES, SMALL, gradients, single
from tests.support.marks import in_campaign
from tests.support.ranks import RankContext, rank_values

BATCH, LENGTH = 3, 24
METHODS: tuple[ContextMethod, ...] = ("allgather", "ring", "ulysses")
FAMILIES = ("plain", "grouped", "gemma", "scaled", "qk_norm", "biases")


def config(shape: str, **changes: Any) -> ModelConfig:
    return ModelConfig.model_validate({**SMALL, **SHAPES[shape], **changes})


def samples(model: ModelConfig, documents: bool, batch: int = BATCH) -> tuple[Tensor, ...]:
    """Documents begin at other places in each row; the last row is one document."""
    generator = torch.Generator().manual_seed(3)
    text, targets = torch.randint(0, model.vocab_size, (2, batch, LENGTH), generator=generator)
    targets[0, 2:5] = -100
    if not documents:
        return text, targets
    begins = torch.rand(batch, LENGTH, generator=generator) < 0.3
    begins[-1] = False
    return text, targets, begins.cumsum(1)


def spread(
    model: ModelConfig, method: ContextMethod, ring: int, traffic: TrafficCounter | None = None
) -> NextTokenObjective:
    group = dist.group.WORLD
    assert group is not None
    objective = single(model)
    objective.context = ContextParallel(group, method, ring, traffic)
    return objective


def check_parity(rank: RankContext, methods: list[ContextMethod], ring: int) -> None:
    rank.init_torch_world()
    for shape, documents in product(FAMILIES, (False, True)):
        enough_heads = {"kv_heads": 4} if "ulysses" in "".join(methods) else {}
        model = config(shape, **enough_heads)
        reference, given = single(model), samples(model, documents)
        want = reference(*given)
        want.backward()
        whole = gradients(reference)
        for method in methods:
            what = f"{method} {shape} documents {documents}"
            objective = spread(model, method, ring)
            got = objective(*given)
            got.backward()
            torch.testing.assert_close(got, want, rtol=1e-12, atol=0, msg=what)
            for name, gradient in gradients(objective).items():
                dist.all_reduce(gradient)
                said = f"{what} {name}"
                torch.testing.assert_close(gradient, whole[name], rtol=1e-10, atol=1e-11, msg=said)
            with torch.no_grad():
                torch.testing.assert_close(objective(*given), want, rtol=1e-12, atol=0)
    dist.barrier()


@pytest.mark.parametrize(
    ("cp", "methods", "ring"),
    [
        (2, METHODS, 2),
        in_campaign(3, ("allgather", "ring"), 3),
        in_campaign(4, (*METHODS, "ulysses-ring"), 2),
    ],
)
def test_parity(cp: int, methods: tuple[ContextMethod, ...], ring: int) -> None:
    arguments = {"methods": list(methods), "ring": ring}
    rank_values(check_parity, cp, arguments, deadline=240)


def check_bytes(rank: RankContext, method: ContextMethod, ring: int) -> float:
    """Elements that a forward and a backward of this rank send."""
    rank.init_torch_world()
    model, traffic = config("plain"), TrafficCounter()
    objective = spread(model, method, ring, traffic)
    given = samples(model, documents=False)
    for _ in range(2):  # the first one may send what is only needed once
        traffic.reset()
        objective(*given).backward()
    dist.barrier()
    return traffic.bytes_by_kind["cp"] / 8


@pytest.mark.parametrize(
    ("method", "n"),
    [
        ("allgather", 2),
        in_campaign("allgather", 4),
        ("ring", 2),
        in_campaign("ring", 4),
        in_campaign("ulysses", 4),
        in_campaign("ulysses-ring", 4),
    ],
)
def test_bytes_are_those_of_the_formulas(method: ContextMethod, n: int) -> None:
    """The formulas of `parallel/axes/context.py`; the loss is one element, sent and received."""
    model = config("plain")
    tokens, size, query, key = BATCH * LENGTH, model.head_size, model.heads, model.kv_heads
    r = {"ulysses": 1, "ulysses-ring": 2}.get(method, n)
    u = n // r
    swaps = 4 * (u - 1) / (u * n) * tokens * (query + key) * size
    keys = 6 * (r - 1) / n * tokens * key * size
    formula = model.layers * (swaps + keys) + 2 * (n - 1) / n
    arguments = {"method": method, "ring": 2}
    for sent in rank_values(check_bytes, n, arguments):
        assert sent == pytest.approx(formula, rel=0.02)


# --- without other ranks ----------------------------------------------------------------------


def _by_scores(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, cap: float) -> Tensor:
    """Attention with all scores at once.  q: [B, S, H, h]; k, v: [B, S, K, h]; seen: [B, S, S]"""
    groups = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(groups, 2).transpose(1, 2) for x in (k, v))
    scores = q.transpose(1, 2) @ k.mT * scale
    scores = (scores / cap).tanh() * cap if cap else scores
    return (scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize("window", [0, 1, 3, 4, 6, 9])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(
    ("kernel", "cap"),
    [(FusedAttention(), 0.0), (ScoresAttention(), 0.0), (ScoresAttention(1.5), 1.5)],
    ids=["fused", "scores", "limited"],
)
def test_partial_attention_adds_up(
    kernel: PartialAttention, cap: float, apart: bool, window: int
) -> None:
    """Keys in chunks of any order, merged, and gradients of each by itself."""
    size, order, scale = 4, [2, 0, 3, 1], 0.3
    length = size * len(order)
    torch.manual_seed(1)
    documents = torch.tensor([[0] * 5 + [1] * 6 + [2] * 5, [0] * length]) if apart else None
    q = torch.randn(2, length, 4, 8, dtype=torch.float64, requires_grad=True)
    k, v = torch.randn(2, 2, length, 2, 8, dtype=torch.float64).requires_grad_().unbind()
    distance = torch.arange(length)[:, None] - torch.arange(length)
    seen = ((distance >= 0) & (distance < (window or length))).expand(2, -1, -1)
    if documents is not None:
        seen = seen & (documents[:, :, None] == documents[:, None])
    want = _by_scores(q, k, v, seen, scale, cap)
    g = torch.randn_like(want)
    wanted = torch.autograd.grad(want, (q, k, v), g)

    relations = TokenRelations(size, documents).within(window)
    heads = [x.detach().transpose(1, 2) for x in (q, k, v, g)]
    moved = [torch.cat([torch.split(x, size, 2)[c] for c in order], 2) for x in heads[1:3]]
    merged = MergedAttention(q.detach())
    totals = [torch.zeros_like(x) for x in (heads[0], *moved)]
    parts = list(find_parts(range(len(order)), order, relations.look))
    for backward in (False, True):
        for query, first, last, sight in parts:
            rows = slice(query * size, (query + 1) * size)
            keys = slice(first * size, (last + 1) * size)
            mask = relations.mask(query, order[first], q.device) if sight == "mask" else None
            k, v = (x[:, :, keys] for x in moved)
            given = Keys(k, v, mask, sight == "causal", scale)
            if not backward:
                merged.add(rows, *kernel.forward(heads[0][:, :, rows], given))
                continue
            both = merged.out[:, :, rows], merged.logs[:, :, rows]
            found = kernel.backward(heads[3][:, :, rows], heads[0][:, :, rows], given, both)
            for total, place, more in zip(totals, (rows, keys, keys), found, strict=True):
                total[:, :, place] += more
    torch.testing.assert_close(merged.out.transpose(1, 2), want, rtol=1e-11, atol=1e-12)
    back = [
        totals[0],
        *(
            torch.cat([torch.split(x, size, 2)[order.index(c)] for c in range(4)], 2)
            for x in totals[1:]
        ),
    ]
    for ours, theirs in zip(back, wanted, strict=True):
        torch.testing.assert_close(ours.transpose(1, 2), theirs, rtol=1e-11, atol=1e-12)


def test_every_rank_has_equal_work() -> None:
    """Pairs of chunks that are seen, of one document: as many for each rank."""
    for ranks in (2, 3, 4, 8):
        look = TokenRelations(1, None).look
        pairs = [
            sum(last - first + 1 for _, first, last, _ in find_parts(mine, range(2 * ranks), look))
            for mine in (chunks_of(rank, ranks) for rank in range(ranks))
        ]
        assert set(pairs) == {2 * ranks + 1}
