"""Cached generation against logits computed afresh, and the sampler against its distribution."""

from __future__ import annotations

import pytest
import torch

from holdfast.errors import UserError
from holdfast.model.generate import DecodingSession, generate, sample
from tests.support.models import SHAPES, config, lively, tokens


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("pieces", [[1] * 12, [5, 1, 1, 1, 4], [3, 6, 3], [12]])
def test_cached_logits_are_the_uncached(shape: str, pieces: list[int]) -> None:
    model, text = lively(config(**SHAPES[shape]), dtype=torch.float64), tokens(2, 12)
    whole, session, seen = model(text), DecodingSession(model, 16), 0
    for length in pieces:
        logits = session.read(text[:, seen : seen + length])
        seen += length
        torch.testing.assert_close(logits, whole[:, seen - 1], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shape", ["llama_grouped_scaled", "qwen3_tied"])
def test_greedy_text_is_that_of_argmax(shape: str) -> None:
    model, text = lively(config(**SHAPES[shape])), tokens(3, 4)
    slow = text
    for _ in range(10):
        slow = torch.cat((slow, model(slow)[:, -1].argmax(-1, keepdim=True)), 1)
    streamed: list[torch.Tensor] = []
    fast = generate(model, text, 10, temperature=0, on_token=streamed.append)
    assert torch.equal(fast, slow)
    assert torch.equal(torch.stack(streamed, 1), slow[:, 4:])


def test_seed_decides_the_text() -> None:
    model, text = lively(config()), tokens(1, 4)
    first, again = (generate(model, text, 20, seed=1) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, generate(model, text, 20, seed=2))
    # The draw of token n is keyed by n: a shorter text is a prefix of a longer one.
    assert torch.equal(generate(model, text, 7, seed=1), first[:, :11])


def test_stop_ends_each_row() -> None:
    model, text = lively(config()), tokens(4, 3)
    free = generate(model, text, 40, seed=3)
    stop = int(free[0, 10])
    ended = generate(model, text, 40, seed=3, stop=[stop, 10**6])
    for row, wanted in zip(ended[:, 3:], free[:, 3:], strict=True):
        at = wanted.tolist().index(stop) if stop in wanted.tolist() else len(wanted)
        assert torch.equal(row[: at + 1], wanted[: len(row)][: at + 1])
        assert (row[at + 1 :] == stop).all()
    alone = generate(model, text[:1], 40, seed=3, temperature=0)
    likeliest = int(alone[0, 5])
    stopped = generate(model, text[:1], 40, temperature=0, stop=[likeliest])
    assert stopped.shape[1] <= 6
    assert stopped[0, -1] == likeliest


def test_sampling_follows_the_softmax() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    for temperature in (0.5, 1.0, 2.0):
        drawn = torch.cat([sample(logits, temperature, 1.0, seed) for seed in range(4000)])
        shares = torch.bincount(drawn, minlength=4) / 4000
        torch.testing.assert_close(shares, (logits[0] / temperature).softmax(0), rtol=0, atol=0.04)


def test_nucleus_is_the_smallest_set_that_reaches_top_p() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    for top_p, kept in ((0.01, 1), (0.49, 1), (0.6, 2), (0.79, 2), (0.9, 3), (0.96, 4), (1.0, 4)):
        drawn = {int(sample(logits, 1.0, top_p, seed)) for seed in range(300)}
        assert drawn == set(range(kept)), top_p


def test_rows_of_a_batch_are_drawn_apart() -> None:
    drawn = sample(torch.zeros(64, 50), 1.0, 1.0, 1)
    assert len(set(drawn.tolist())) > 20


def test_what_cannot_be_sampled_is_refused() -> None:
    model = lively(config(max_position=16))
    assert generate(model, tokens(1, 4), 12, seed=1).shape == (1, 16)
    with pytest.raises(UserError, match="17 tokens are more than the model's 16 positions"):
        generate(model, tokens(1, 4), 13)
    with pytest.raises(UserError, match="cannot be sampled from"):
        generate(model, tokens(1, 4), 1, temperature=-1.0)
    with pytest.raises(UserError, match="cannot be sampled from"):
        generate(model, tokens(1, 4), 1, top_p=0.0)
    with pytest.raises(UserError, match="prompt is empty"):
        generate(model, tokens(1, 0), 1)
