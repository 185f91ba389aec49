"""A skipped microbatch adds exactly nothing: not to the loss, not to the gradient."""

from __future__ import annotations

import torch

from tests.support.ranks import RankContext, rank_values
from tests.support.tiny_training import LENGTH, Fed, engine, feed, tiny

SKIPPED = 3


def _blank() -> Fed:
    """What `Batches.blank_microbatch` feeds: the same token everywhere, and no target."""
    tokens = torch.full((2, LENGTH), 5)
    return Fed(tokens, torch.full((2, LENGTH), -100), None, 0)


def _gradients(rank: RankContext, all_of_them: bool) -> list[object]:
    config = tiny(train__precision="float64")
    made = engine(config, rank.rank, rank.store(), replicas=rank.world_size)
    share = made.begin(1)
    made.compute([_blank() if all_of_them or leaf == SKIPPED else feed(1, leaf) for leaf in share])
    verdict = made.reduce()
    total = sum(float(g.abs().sum()) for g in made._gradients.gradients())
    made.close()
    return [verdict.tokens, verdict.loss, verdict.norm, total, verdict.is_finite]


def test_a_step_of_nothing_but_skipped_microbatches_has_a_gradient_of_zero() -> None:
    assert rank_values(_gradients, 1, {"all_of_them": True}) == [[0, 0.0, 0.0, 0.0, True]]


def test_whoever_has_a_skipped_microbatch_the_bits_are_the_same() -> None:
    ((tokens, loss, norm, _, _),) = rank_values(_gradients, 1, {"all_of_them": False})
    want = sum(feed(1, leaf).tokens for leaf in range(12) if leaf != SKIPPED)
    assert (tokens, norm > 0) == (want, True)
    for other in rank_values(_gradients, 3, {"all_of_them": False}):
        assert other[:3] == [tokens, loss, norm]
