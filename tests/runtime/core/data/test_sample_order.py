"""Positions, sources and samples against counting them one by one."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.data.sample_order import BatchSchedule, Mixture, SampleOrder
from holdfast.errors import ConfigError

STAGES = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 9)), max_size=4, unique_by=lambda s: s[0]
).map(sorted)
WEIGHTS = st.lists(st.floats(0.05, 10.0), min_size=1, max_size=5)


@given(first=st.integers(1, 9), stages=STAGES)
def test_schedule_equals_adding_up(first: int, stages: list[tuple[int, int]]) -> None:
    schedule = BatchSchedule(first, stages)
    sizes, size = [], first
    for step in range(1, 61):
        size = dict(stages).get(step, size)
        sizes.append(size)
    assert [schedule.size(step) for step in range(1, 61)] == sizes
    assert [schedule.position(step) for step in range(1, 62)] == np.cumsum([0, *sizes]).tolist()


def test_schedule_refuses_what_is_out_of_order() -> None:
    with pytest.raises(ConfigError, match="rise"):
        BatchSchedule(4, [(5, 8), (5, 16)])
    with pytest.raises(ValueError, match="numbered from 1"):
        BatchSchedule(4).size(0)


@given(weights=WEIGHTS, start=st.integers(0, 10**9))
@settings(deadline=None, max_examples=30)
def test_mixture_counts_and_numbers_each_source(weights: list[float], start: int) -> None:
    mixture = Mixture(weights)
    length = 500
    sources, ordinals = mixture.assign_many(np.arange(start, start + length))
    for source in range(len(weights)):
        mine = ordinals[sources == source].tolist()
        begin = mixture.count_before(source, start)
        assert mine == list(range(begin, begin + len(mine)))
        assert mixture.count_before(source, start + length) == begin + len(mine)
    for offset in (0, 17, length - 1):
        assert mixture.assign(start + offset) == (sources[offset], ordinals[offset])


@given(weights=WEIGHTS)
@settings(deadline=None, max_examples=30)
def test_mixture_keeps_the_weights(weights: list[float]) -> None:
    mixture = Mixture(weights)
    total = sum(weights)
    for count, weight in zip(mixture.counts, weights, strict=True):
        assert abs(count / mixture.block - weight / total) <= 1.01 / 10_000
    # Spread evenly: within a block no source is ever more than a place or so per source behind.
    for place in range(0, mixture.block, max(1, mixture.block // 50)):
        for source, count in enumerate(mixture.counts):
            due = place * count / mixture.block
            assert abs(mixture.count_before(source, place) - due) <= len(weights)


def test_simple_weights_give_a_short_block() -> None:
    assert Mixture([3.0, 1.0]).counts == [3, 1]
    assert Mixture([0.5, 0.25, 0.25]).counts == [2, 1, 1]
    assert Mixture([1.0]).block == 1


def test_mixture_refuses_a_vanishing_weight() -> None:
    with pytest.raises(ConfigError, match="ten-thousandth"):
        Mixture([1.0, 1e-6])


@given(sizes=st.lists(st.integers(1, 60), min_size=1, max_size=3), seed=st.integers(0, 2**63 - 1))
@settings(deadline=None, max_examples=30)
def test_each_epoch_has_every_sample_once(sizes: list[int], seed: int) -> None:
    order = SampleOrder(seed, sizes, [1.0] * len(sizes))
    source, epoch, sample = order.places(0, 3 * len(sizes) * max(sizes))
    seen = Counter(zip(source.tolist(), epoch.tolist(), sample.tolist(), strict=True))
    assert set(seen.values()) == {1}
    for s, size in enumerate(sizes):
        for e in range(3):
            assert {k for (a, b, k) in seen if (a, b) == (s, e)} == set(range(size))


def test_places_do_not_depend_on_how_they_are_asked_for() -> None:
    order = SampleOrder(5, [1000, 300], [2.0, 1.0])
    whole = np.stack(order.places(0, 900))
    pieces = [np.stack(order.places(a, b)) for a, b in ((0, 7), (7, 500), (500, 900))]
    assert np.array_equal(whole, np.concatenate(pieces, axis=1))
    place = order.place(623)
    assert [place.source, place.epoch, place.sample] == whole[:, 623].tolist()


def test_epochs_and_seeds_have_their_own_order() -> None:
    first, second = (np.stack(SampleOrder(s, [500], [1.0]).places(0, 1000))[2] for s in (1, 2))
    assert not np.array_equal(first[:500], first[500:])
    assert not np.array_equal(first, second)
