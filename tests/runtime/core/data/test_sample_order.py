"""Positions, sources and samples against counting them one by one."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.data.permutation import MAX_SIZE, Permutation
from holdfast.core.data.sample_order import (
    BatchSchedule,
    MixChange,
    Mixture,
    SampleOrder,
    SourceEnd,
)
from holdfast.core.data.target_weights import (
    LARGEST,
    PER_ONE,
    add_weights,
    byte_of,
    target_ids,
    target_weights,
    total_weight,
    with_weights,
)
from holdfast.core.weights import UNIT
from holdfast.errors import ConfigError

KEYS = st.integers(0, 2**63 - 1)
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


@given(weights=st.lists(st.integers(0, 300), min_size=1, max_size=8).filter(any))
@settings(deadline=None, max_examples=40)
def test_an_exact_mixture_is_never_a_sample_off(weights: list[int]) -> None:
    mixture = Mixture.exact(weights, "here")
    places = np.arange(mixture.block + 1)
    for source, weight in enumerate(weights):
        counted = [mixture.count_before(source, at) for at in places.tolist()]
        assert np.abs(counted - places * weight / sum(weights)).max() < 1
        for ordinal in (0, 1, 2 * mixture.counts[source]) if weight else ():
            assert mixture.assign(mixture.position_of(source, ordinal)) == (source, ordinal)


@st.composite
def orders(draw: st.DrawFn) -> tuple[SampleOrder, list[SourceEnd | None]]:
    sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    count = len(sizes)
    ends = [
        draw(st.sampled_from([None, SourceEnd(2 * size, "leave"), SourceEnd(size, "stop")]))
        for size in sizes
    ]
    weights = st.lists(st.integers(0, 7), min_size=count, max_size=count).filter(any)
    starts = draw(st.lists(st.integers(0, 200), max_size=3, unique=True).map(sorted))
    changes = [MixChange(start, tuple(draw(weights))) for start in starts]
    first = draw(st.lists(st.integers(1, 5), min_size=count, max_size=count))
    return SampleOrder(draw(KEYS), sizes, first, changes, ends), ends


@given(made=orders(), cut=st.integers(0, 400))
@settings(deadline=None, max_examples=100)
def test_each_pass_has_every_sample_once_and_each_end_is_kept(
    made: tuple[SampleOrder, list[SourceEnd | None]], cut: int
) -> None:
    order, ends = made
    length = min(order.length, 400)
    places = order.places(0, length)
    assert len(set(zip(*(each.tolist() for each in places), strict=True))) == length
    for source, end in enumerate(ends):
        assert int((places[0] == source).sum()) == order.count_before(source, length)
        assert end is None or order.count_before(source, length) <= end.samples
        last = places[1][places[0] == source]
        assert (np.diff(last) >= 0).all()
    if order.length <= 400:
        end = ends[order.stopped_by]
        assert end is not None
        assert order.count_before(order.stopped_by, length) == end.samples
    pieces = [order.places(*part) for part in ((0, min(cut, length)), (min(cut, length), length))]
    for whole, parts in zip(places, zip(*pieces, strict=True), strict=True):
        assert np.array_equal(whole, np.concatenate(parts))


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


# --- the keyed permutation ------------------------------------------------------------------------
@given(size=st.integers(1, 3000), key=KEYS)
@settings(deadline=None, max_examples=60)
def test_every_size_is_permuted(size: int, key: int) -> None:
    image = Permutation(size, key).apply_many(np.arange(size))
    assert np.array_equal(np.sort(image), np.arange(size))


@given(size=st.integers(1, MAX_SIZE), key=KEYS, where=st.floats(0, 1, exclude_max=True))
@settings(deadline=None, max_examples=100)
def test_one_index_equals_the_vectorised_path(size: int, key: int, where: float) -> None:
    permutation = Permutation(size, key)
    index = min(int(size * where), size - 1)
    image = permutation(index)
    assert 0 <= image < size
    assert permutation.apply_many(np.array([[index]])).tolist() == [[image]]


@given(key=KEYS, start=st.integers(0, 10**12 - 5000))
@settings(deadline=None, max_examples=20)
def test_no_collision_within_a_large_domain(key: int, start: int) -> None:
    image = Permutation(10**12, key).apply_many(np.arange(start, start + 5000))
    assert len(np.unique(image)) == 5000


@pytest.mark.parametrize("size", [10**6, 2**20, 2**20 + 1, 10**12, 2**40 + 1])
def test_the_domain_hardly_exceeds_the_size(size: int) -> None:
    """Cycle walking is what could make an index cost more for one size than for another."""
    permutation = Permutation(size, 1)
    domain = permutation._a * permutation._b
    assert size <= domain <= size + 2 * size**0.5


def test_keys_give_unrelated_orders() -> None:
    size, keys = 997, 400
    images = np.stack([Permutation(size, key).apply_many(np.arange(size)) for key in range(keys)])
    # Where a fixed index goes must be uniform over keys: chi-squared over ten bins of 100, whose
    # 99.99 % point for nine degrees of freedom is 33.7.
    for index in (0, 1, size // 2, size - 1):
        seen = np.histogram(images[:, index], bins=10, range=(0, size))[0]
        assert ((seen - keys / 10) ** 2 / (keys / 10)).sum() < 33.7
    # Neighbours must not stay neighbours: about two pairs in `size` would by chance.
    steps = np.abs(np.diff(images, axis=1))
    assert (steps == 1).mean() < 4 * 2 / size


def test_a_known_value_never_changes() -> None:
    """The order of every run that was ever audited depends on these."""
    assert Permutation(1000, 7).apply_many(np.arange(6)).tolist() == [884, 918, 794, 872, 162, 328]


def test_bad_arguments_are_refused() -> None:
    for size in (0, -1, MAX_SIZE + 1):
        with pytest.raises(ValueError, match="impossible"):
            Permutation(size, 1)
    with pytest.raises(IndexError):
        Permutation(10, 1)(10)
    with pytest.raises(IndexError):
        Permutation(10, 1).apply_many(np.array([3, 10]))
    with pytest.raises(IndexError):
        Permutation(10, 1).apply_many(np.array([-1]))


# --- weights in the bytes of a mask, and in targets -----------------------------------------------
MASKED = -100


def test_each_hundredth_has_a_byte_of_its_own() -> None:
    weights = [number / PER_ONE for number in range(LARGEST + 1)]
    found = [byte_of(weight) for weight in weights]
    assert len(set(found)) == LARGEST + 1
    assert (found[0], found[1], found[100], found[254]) == (0, 2, 1, 255)


@pytest.mark.parametrize("weight", [-1, 0.005, 2.55, 3, 1 / 3, True, "1", None, float("nan")])
def test_what_is_no_hundredth_has_none(weight: object) -> None:
    assert byte_of(weight) is None


def test_targets_carry_their_weights_and_masked_ones_none() -> None:
    ids = np.array([7, 2**31 - 1, 0, 9, 4], dtype=np.int64)
    packed = add_weights(ids, np.array([1, 51, 255, 0, 2], dtype=np.uint8))
    assert packed[0] == 7  # counts once: its token id alone
    packed[3] = MASKED
    assert target_ids(packed).tolist() == [7, 2**31 - 1, 0, MASKED, 4]
    weights = target_weights(packed)
    assert weights.tolist() == pytest.approx([1.0, 0.5, 2.54, 0.0, 0.01])
    assert total_weight(packed) == pytest.approx(4.05, abs=UNIT)
    assert np.array_equal(with_weights(target_ids(packed), weights), packed)
    assert repr(total_weight(np.array([3, 4, MASKED]))) == "2"
