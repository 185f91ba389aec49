"""Embedding and cross entropy over a cut vocabulary against torch's own."""

from __future__ import annotations

import functools
import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from holdfast.config.sections.model import ModelConfig
from holdfast.model.decoder import Embedding
from holdfast.parallel.axes.vocab_parallel import (
    VocabularyEmbedding,
    VocabularyPart,
    VocabularySoftmax,
)
from holdfast.parallel.comm.collectives import Collectives
from holdfast.parallel.comm.comm_stats import TrafficCounter
from holdfast.training.engine.objective import linear_cross_entropy
from tests.support.ranks import RankContext, ranks

DIM, TOKENS = 8, 37


def model_of(vocabulary: int, multiple: int = 1) -> ModelConfig:
    return ModelConfig.model_validate({"vocab_size": vocabulary, "vocab_multiple": multiple})


def world(rank: RankContext) -> dist.ProcessGroup:
    rank.init_torch_world()
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def test_parts_hold_each_token_once() -> None:
    for vocabulary, multiple in ((61, 1), (3, 1), (5, 1), (1, 1), (61, 8), (3, 8), (64, 64)):
        for tp in (1, 2, 4):
            model = model_of(vocabulary, multiple)
            parts = [VocabularyPart.of(model, tp, i) for i in range(tp)]
            tokens = [t for part in parts for t in range(part.first, part.first + part.rows)]
            assert tokens == list(range(vocabulary)), (vocabulary, multiple, tp)


@pytest.mark.parametrize("vocabulary", [61, 5, 3])
@pytest.mark.parametrize("size", [1.0, 1e4])
@ranks(4)
def test_loss_and_gradients_are_those_of_cross_entropy(
    rank: RankContext, vocabulary: int, size: float
) -> None:
    """In chunks, with tokens that carry no loss, and with logits that overflow without care."""
    group = world(rank)
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, DIM, generator=generator, dtype=torch.float64) * size
    weight = torch.randn(vocabulary, DIM, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, vocabulary, (TOKENS,), generator=generator)
    targets[::5] = -100
    whole = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    want = F.cross_entropy(whole[0] @ whole[1].T, targets, reduction="sum") * 0.5
    want_hidden, want_weight = torch.autograd.grad(want, whole)
    near = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12 * size)
    for chunk in (None, 10):
        traffic = TrafficCounter()
        collectives = Collectives(group, traffic)
        part = VocabularyPart.of(model_of(vocabulary), 4, rank.rank)
        own = slice(part.first, part.first + part.rows)
        given = hidden.clone().requires_grad_(), weight[own].clone().requires_grad_()
        softmax = VocabularySoftmax(part, collectives)
        got = linear_cross_entropy(*given, targets, chunk, part=softmax) * 0.5
        near(got, want)
        summand, rows = torch.autograd.grad(got, given)
        near(rows, want_weight[own])
        near(collectives.all_reduce(summand), want_hidden)
        with torch.no_grad():
            again = linear_cross_entropy(*given, targets, chunk, part=softmax) * 0.5
        near(again, want)
        logits = (hidden @ weight.T).requires_grad_()
        every = logits.log_softmax(-1)
        (slope,) = torch.autograd.grad(-(every.exp() * every).sum(), logits)
        near(softmax.entropy_gradient(logits.detach()[:, own]), slope[:, own])
    dist.barrier()


@ranks(2)
def test_all_ranks_see_the_same_bits_of_a_loss_and_a_nan_of_any(rank: RankContext) -> None:
    group = world(rank)
    part = VocabularyPart.of(model_of(61), 2, rank.rank)
    collectives = Collectives(group)
    softmax = VocabularySoftmax(part, collectives)
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(TOKENS, 61, generator=generator)[:, part.first : part.first + part.rows]
    targets = torch.randint(0, 61, (TOKENS,), generator=generator)
    losses = softmax.losses(logits, targets)
    assert torch.equal(losses, softmax.losses_and_gradient(logits.clone(), targets)[0])
    both = collectives.all_gather(losses[None])
    assert torch.equal(both[0], both[1])
    if rank.rank == 1:
        logits[3, 0] = math.nan
    broken = softmax.losses(logits, targets)
    assert broken.isnan().nonzero().flatten().tolist() == [3]
    dist.barrier()


@ranks(4)
def test_embedding_is_the_sum_of_what_ranks_hold(rank: RankContext) -> None:
    group = world(rank)
    collectives = Collectives(group)
    for vocabulary in (61, 5, 3):
        generator = torch.Generator().manual_seed(2)
        weight = torch.randn(vocabulary, DIM, generator=generator, dtype=torch.float64)
        text = torch.randint(0, vocabulary, (3, 7), generator=generator)
        upstream = torch.randn(3, 7, DIM, generator=generator, dtype=torch.float64)
        whole = weight.clone().requires_grad_()
        want = F.embedding(text, whole)
        want.backward(upstream)  # type: ignore[no-untyped-call]
        assert whole.grad is not None
        part = VocabularyPart.of(model_of(vocabulary), 4, rank.rank)
        own = slice(part.first, part.first + part.rows)
        table = Embedding(1, DIM)
        table.weight = torch.nn.Parameter(weight[own].clone())
        embedding = VocabularyEmbedding(table, part)
        got = collectives.reduce(embedding(text))
        assert torch.equal(got, want)
        got.backward(upstream)  # type: ignore[no-untyped-call]
        assert embedding.weight.grad is not None
        torch.testing.assert_close(embedding.weight.grad, whole.grad[own], rtol=0, atol=0)
    dist.barrier()
