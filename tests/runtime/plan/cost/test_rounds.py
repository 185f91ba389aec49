"""Rounds of learners on slow links: the fewest inner steps, and what a link carries."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.core.sharding.state_table import learner_shares
from holdfast.plan.cost.rounds import CodecChoice, RoundModel, Site, best_round

NONE = CodecChoice("none", 0)
CODED = CodecChoice("int8", 1_000_000, 0.02, 0.01)


def model(workers: int = 2, learners: int = 4, latency_s: float = 0.02) -> RoundModel:
    sites = tuple(Site(name, workers // 2, 1e6, latency_s, 0.05) for name in "ab")
    return RoundModel(learner_shares(learners, workers), 1_000_000, sites, 0.1, 0.3, 7.2)


@pytest.mark.parametrize("codec", [NONE, CODED], ids=lambda codec: codec.name)
@pytest.mark.parametrize("share", [0.5, 0.9])
def test_the_fewest_steps_are_those_of_a_search_one_by_one(
    codec: CodecChoice, share: float
) -> None:
    rounds = model()
    found = rounds.least_steps(codec, share)
    steps = next(n for n in range(1, 10**4) if rounds.cost(n, codec).safe_share >= share)
    assert found is not None
    assert found.every_steps == steps
    overhead_s = found.round_s - found.compute_s
    assert found.compute_s / (found.compute_s + 1.25 * overhead_s) >= share


def test_a_share_that_coding_alone_rules_out_has_no_number_of_steps() -> None:
    endless = RoundModel(((0,), (1,)), 100, (Site("a", 2, 1e6),), 0.0)
    assert endless.least_steps(CODED, 0.9) is None
    assert best_round(endless, [CODED], 0.9) == (None, {})


def test_sums_and_payloads_fill_the_link_with_their_bytes() -> None:
    rounds = model(latency_s=0.0)
    sums, coded = rounds.cost(10, NONE), rounds.cost(10, CODED)
    assert sums.sent_bytes == 2 * 4e6 / 2  # a piece and a sum, half of 4 MB each
    assert sums.exchange_s == pytest.approx(4.0)
    assert coded.sent_bytes == 2e6
    assert coded.exchange_s == pytest.approx(1.0)  # the first payload leaves while one computes
    assert coded.codec_s == pytest.approx(2 * 0.02 + 4 * 0.01)
    assert coded.round_s == pytest.approx(2 * 10 * 0.1 + 0.08 + 1.0 + 0.3)
    usd = 7.2 * coded.round_s / 3600 + 4e6 * 0.05 / 1e9
    assert coded.usd == pytest.approx(usd)


def test_overlap_hides_the_exchange_behind_the_last_inner_steps() -> None:
    plain = model(latency_s=0.0)
    for steps, left in ((0, 4.0), (5, 3.5), (40, 0.0)):
        rounds = replace(plain, overlap_steps=steps)
        assert rounds.cost(50, NONE).exchange_s == pytest.approx(left)
        assert rounds.cost(50, NONE).compute_s == plain.cost(50, NONE).compute_s
    hidden = replace(plain, rest_s=0.0, overlap_steps=40).least_steps(NONE, 0.9)
    assert hidden is not None
    assert hidden.every_steps == 41  # one step before the change leaves


def test_a_round_of_a_fragment_has_its_part_of_steps_and_values() -> None:
    plain = model()
    parts = replace(plain, values=plain.values // 4, fragments=4)
    expected = replace(plain, values=plain.values // 4).cost(10, NONE)
    assert parts.cost(40, NONE) == replace(expected, every_steps=40)
    least = parts.least_steps(NONE, 0.9)
    assert least is not None
    assert least.every_steps % 4 == 0


def test_all_workers_of_a_site_share_its_link() -> None:
    one, two = model(2), model(4)
    assert two.cost(10, CODED).leaving_bytes == 2 * one.cost(10, CODED).leaving_bytes
    assert two.cost(1, CODED).exchange_s > one.cost(1, CODED).exchange_s
